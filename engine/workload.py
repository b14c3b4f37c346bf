"""Requests as a load brings them: when they arrive, and how long they are.

The same seed gives the same requests to whoever asks: to `blinkbed compare`, which sends them in
real time, and to `blinkbed simulate`. Arrivals are Poisson; lengths follow the table in
lengths.json.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from engine.errors import UserError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

LENGTHS = Path(__file__).parent / "lengths.json"
CHUNK = 1 << 16  # requests that are in memory at once
TRACE_KEYS = ("arrival_s", "prompt_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class Requests:
    """Some requests in order of arrival: f8[n] seconds, i4[n] and i4[n] tokens."""

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints

    def __len__(self) -> int:
        return len(self.arrival_s)


@dataclass(frozen=True, slots=True)
class LengthTable:
    """Quantiles of prompt and output lengths, tokens; drawn from independently."""

    name: str
    percent: tuple[float, ...]
    prompt_tokens: tuple[float, ...]
    output_tokens: tuple[float, ...]

    @classmethod
    def load(cls, path: Path = LENGTHS) -> Self:
        """A table as lengths.json has it; raises UserError for any other file."""
        try:
            fields = json.loads(path.read_text())
            name = str(fields["name"])
            columns = [
                tuple(float(one) for one in fields[key])
                for key in ("percent", "prompt_tokens", "output_tokens")
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is no table of lengths ({error!r})") from error
        if len({len(column) for column in columns}) != 1 or not columns[0]:
            raise UserError(f"{path}: the columns must be of one length")
        if list(columns[0]) != sorted(set(columns[0])):
            raise UserError(f"{path}: percent must ascend")
        return cls(name, *columns)


def arrivals(rate_per_s: float, num_requests: int, seed: int) -> Floats:
    """f8[num_requests]: arrival times of a Poisson process, seconds from the begin, ascending."""
    return np.cumsum(_arrival_source(seed).exponential(1.0 / rate_per_s, num_requests))


def lengths(
    num_requests: int, seed: int, *, max_context: int, table: LengthTable | None = None
) -> Ints:
    """i4[num_requests, 2]: tokens of prompt and output, at least 1, together at most max_context.

    A prompt takes at most half of the context, an output what is left.
    """
    return _lengths(_length_source(seed), num_requests, max_context, table or LengthTable.load())


def _arrival_source(seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, 0])


def _length_source(seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, 1])


def _lengths(
    source: np.random.Generator, num_requests: int, max_context: int, table: LengthTable
) -> Ints:
    drawn = source.uniform(0, 100, (num_requests, 2))
    prompt = np.interp(drawn[:, 0], table.percent, table.prompt_tokens).astype(np.int32)
    output = np.interp(drawn[:, 1], table.percent, table.output_tokens).astype(np.int32)
    prompt = np.clip(prompt, 1, max(1, max_context // 2))
    return np.stack([prompt, np.clip(output, 1, np.maximum(1, max_context - prompt))], axis=1)


def poisson_requests(
    rate_per_s: float,
    num_requests: int,
    seed: int,
    *,
    max_context: int,
    table: LengthTable | None = None,
) -> Iterator[Requests]:
    """`arrivals` and `lengths` together, CHUNK requests at a time."""
    times, sizes = _arrival_source(seed), _length_source(seed)
    known = table or LengthTable.load()
    last_s = 0.0
    for begin in range(0, num_requests, CHUNK):
        count = min(CHUNK, num_requests - begin)
        gaps = times.exponential(1.0 / rate_per_s, count)
        gaps[0] += last_s
        arrival_s = np.cumsum(gaps)
        last_s = float(arrival_s[-1])
        prompt, output = np.ascontiguousarray(_lengths(sizes, count, max_context, known).T)
        yield Requests(arrival_s, prompt, output)


def trace_requests(path: Path, *, max_context: int) -> Iterator[Requests]:
    """Requests of a JSONL file, a line each: {"arrival_s": 0.1, "prompt_tokens": 5,
    "output_tokens": 7}, arrivals ascending.

    Raises UserError that names the line.
    """
    last_s = 0.0
    try:
        with path.open(encoding="utf-8") as lines:
            numbered = enumerate(lines, 1)
            while block := list(itertools.islice(numbered, CHUNK)):
                rows = []
                for number, line in block:
                    row = _trace_row(path, number, line, max_context)
                    if row[0] < last_s:
                        raise UserError(f"{path}, line {number}: it arrives before the one above")
                    last_s = row[0]
                    rows.append(row)
                arrival_s, prompt, output = zip(*rows, strict=True)
                yield Requests(
                    np.array(arrival_s, np.float64),
                    np.array(prompt, np.int32),
                    np.array(output, np.int32),
                )
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error})") from error


def _trace_row(path: Path, number: int, line: str, max_context: int) -> tuple[float, int, int]:
    try:
        fields = json.loads(line)
        arrival_s, prompt, output = (fields[key] for key in TRACE_KEYS)
        row = float(arrival_s), int(prompt), int(output)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(
            f"{path}, line {number}: a request has {', '.join(TRACE_KEYS)} ({error!r})"
        ) from error
    if not 0 <= row[0] < 1e9:
        raise UserError(f"{path}, line {number}: arrival_s={arrival_s} is not within 0 to 1e9")
    if row[1] < 1 or row[2] < 1 or row[1] + row[2] > max_context:
        raise UserError(
            f"{path}, line {number}: {prompt} and {output} tokens must be at least 1 each, and "
            f"together at most --max-context={max_context}"
        )
    return row
