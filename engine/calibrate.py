"""``blinkbed calibrate``: measure the steps of a real GPU into a profile of their times.

A step's time is that of its graph, which is as wide as its bucket of tokens, and of the KV cache
that its attention reads:

    base_ns[bucket] + ns_per_decode_context * (cached tokens that the decode rows read)
                    + ns_per_prefill_pair * (pairs of a prompt's token and one that it sees)
                    + ns_per_prefill_context * (tokens that the prompt's last token sees)

The last term is latency: however few tokens a chunk has, one after the other is looked at.

The profile keeps the measured samples beside the fitted numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import UserError

FORMAT = 1
DECODE_CONTEXTS = (64, 512, 2048, 8192)
PREFILL_OFFSETS = (0, 2048)
MIXED_ROWS = (8, 32, 128)
MIXED_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class Step:
    """What one step computes: rows with one token each, and a chunk of one prompt."""

    decode_rows: int
    decode_context: int  # cached tokens of each decode row
    prefill_tokens: int = 0
    prefill_offset: int = 0  # tokens of that prompt that earlier steps computed

    @property
    def num_tokens(self) -> int:
        return self.decode_rows + self.prefill_tokens

    @property
    def num_rows(self) -> int:
        return self.decode_rows + (self.prefill_tokens > 0)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV the cache must hold after the step."""
        rows = self.decode_rows * (self.decode_context + 1)
        return rows + self.prefill_context

    @property
    def decode_context_tokens(self) -> int:
        return self.decode_rows * self.decode_context

    @property
    def prefill_context(self) -> int:
        return self.prefill_offset + self.prefill_tokens

    @property
    def prefill_pairs(self) -> int:
        n = self.prefill_tokens
        return n * self.prefill_offset + n * (n + 1) // 2


@dataclass(frozen=True, slots=True)
class Sample:
    """A step and its time on the device: the median of its repetitions, and their spread."""

    step: Step
    step_ns: int
    p10_ns: int
    p90_ns: int


@dataclass(frozen=True, slots=True)
class Fit:
    """See the module's text. Errors are relative to the measured times, of the same samples."""

    buckets: tuple[int, ...]
    base_ns: tuple[float, ...]
    ns_per_decode_context: float
    ns_per_prefill_pair: float
    ns_per_prefill_context: float
    error_mean: float
    error_p99: float

    def step_ns(self, step: Step) -> float:
        """Raises ValueError for a step that is wider than the widest bucket."""
        return (
            self.base_ns[bucket_of(self.buckets, step)]
            + self.ns_per_decode_context * step.decode_context_tokens
            + self.ns_per_prefill_pair * step.prefill_pairs
            + self.ns_per_prefill_context * step.prefill_context
        )


def bucket_of(buckets: Sequence[int], step: Step) -> int:
    """Index of the narrowest bucket that holds the step."""
    for index, bucket in enumerate(buckets):
        if step.num_tokens <= bucket:
            return index
    raise ValueError(f"a step of {step.num_tokens} tokens; the widest bucket has {buckets[-1]}")


def steps_to_measure(buckets: Sequence[int], max_rows: int, max_kv_tokens: int) -> Iterator[Step]:
    """For each bucket: decode alone, prompts alone, and both, as wide as it is."""
    for bucket in buckets:
        candidates = [Step(bucket, context) for context in DECODE_CONTEXTS]
        candidates += [Step(0, 0, bucket, offset) for offset in PREFILL_OFFSETS]
        candidates += [Step(r, MIXED_CONTEXT, bucket - r) for r in MIXED_ROWS if r < bucket]
        for step in candidates:
            if step.num_rows <= max_rows and step.kv_tokens <= max_kv_tokens:
                yield step


def fit(samples: Sequence[Sample], buckets: Sequence[int]) -> Fit:
    """Least squares of the relative error. Raises ValueError if a bucket has no sample."""
    num = len(buckets)
    matrix = np.zeros((len(samples), num + 3))
    times = np.array([sample.step_ns for sample in samples], np.float64)
    for row, sample in zip(matrix, samples, strict=True):
        step = sample.step
        row[bucket_of(buckets, step)] = 1
        row[num:] = step.decode_context_tokens, step.prefill_pairs, step.prefill_context
    if not (seen := matrix[:, :num].any(axis=0)).all():
        raise ValueError(f"no step of the bucket of {buckets[int(seen.argmin())]} tokens")
    scale = np.maximum(matrix.max(axis=0), 1)  # columns of one size, for the solver
    solution = np.linalg.lstsq(matrix / scale / times[:, None], np.ones(len(times)), rcond=None)
    numbers = solution[0] / scale
    errors = np.abs(matrix @ numbers / times - 1)
    return Fit(
        buckets=tuple(buckets),
        base_ns=tuple(round(float(number), 1) for number in numbers[:num]),
        ns_per_decode_context=round(float(numbers[num]), 4),
        ns_per_prefill_pair=round(float(numbers[num + 1]), 4),
        ns_per_prefill_context=round(float(numbers[num + 2]), 4),
        error_mean=round(float(errors.mean()), 5),
        error_p99=round(float(np.percentile(errors, 99)), 5),
    )


def profile_of(samples: Sequence[Sample], fitted: Fit, facts: dict[str, Any]) -> dict[str, Any]:
    """What the file holds."""
    return {
        "format": FORMAT,
        "measured": True,
        "date": time.strftime("%Y-%m-%d"),
        **facts,
        **dataclasses.asdict(fitted),
        "samples": [
            {**dataclasses.asdict(s.step), "step_ns": s.step_ns, "p10_ns": s.p10_ns,
             "p90_ns": s.p90_ns}
            for s in samples
        ],
    }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--out", type=Path, required=True, help="the profile to write, JSON")
    parser.add_argument("--model", default="random:8b", help="random:SHAPE (default: %(default)s)")
    parser.add_argument(
        "--max-step-tokens", type=int, default=2048, help="widest step (default: %(default)s)"
    )
    parser.add_argument(
        "--max-running", type=int, default=256, help="most rows (default: %(default)s)"
    )
    parser.add_argument(
        "--num-pages", type=int, default=24576,
        help="KV pages of 16 tokens: bounds rows times context (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--repeat", type=int, default=20, help="times that each step runs (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, fit, write the profile; the exit status. Raises UserError without a GPU."""
    for name in ("max_step_tokens", "max_running", "num_pages", "repeat"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1")
    # Imported on use: only this needs CuPy and a GPU; the first says in a sentence what is missing.
    importlib.import_module("engine.device.cuda_device")
    from engine.device.cuda_calibration import StepTimer

    timer = StepTimer(
        arguments.model,
        max_step_tokens=arguments.max_step_tokens,
        max_running=arguments.max_running,
        num_pages=arguments.num_pages,
        repeat=arguments.repeat,
    )
    samples = []
    for step in steps_to_measure(timer.buckets, arguments.max_running, timer.max_kv_tokens):
        samples.append(timer.measure(step))
        print(f"{samples[-1].step_ns / 1e6:9.3f} ms  {step}", file=sys.stderr, flush=True)
    fitted = fit(samples, timer.buckets)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(profile_of(samples, fitted, timer.facts), indent=1)
    arguments.out.write_text(text + "\n")
    print(
        f"{arguments.out}: {len(samples)} steps, error of the fit {100 * fitted.error_mean:.1f} % "
        f"mean, {100 * fitted.error_p99:.1f} % p99"
    )
    return 0
