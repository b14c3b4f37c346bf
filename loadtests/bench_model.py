"""Measures the model on the CPU: decode against transformers ``generate``, prefill, bandwidth.

Both sides have the same weights, float32, the same threads, the same prompts, and take turns in
one process, so that what else the machine does meets both. Run:

    python -m loadtests.bench_model [--model smollm2] [--threads 2] [--rounds 3] [--json FILE]

Needs the ``dev`` extra (transformers) unless ``--alone``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.model.program import Program
from engine.model.safetensors import file_name
from engine.model.source import DEFAULT_MODEL, ModelSource, open_model
from engine.model.spec import FUSED, ModelSpec, Weight
from engine.protocol import MAX_LOGPROBS, RECORD
from engine.state import PLAN, RESULT, ROW, RowFlag

Prompts = npt.NDArray[np.int64]  # [batch, PROMPT_TOKENS]

PAGE_SIZE = 16
PROMPT_TOKENS = 100
NEW_TOKENS = 200  # at most, so contexts run from 100 to 300
PREFILL_TOKENS = (128, 512)
BATCHES = (1, 8)


def device_array(values: Weight) -> Weight:
    """A copy that begins where device memory would: at a multiple of 512 bytes."""
    memory = np.empty(values.nbytes + 512, dtype=np.uint8)
    start = -memory.ctypes.data % 512
    array = memory[start : start + values.nbytes].view(np.float32).reshape(values.shape)
    array[...] = values
    return array


class Engine:
    """The device program with plain arrays as its memory."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Weight], threads: int) -> None:
        self.max_context = max(PROMPT_TOKENS + NEW_TOKENS, *PREFILL_TOKENS) + PAGE_SIZE
        self.vocab_size = spec.vocab_size
        self.program = Program()
        text = np.frombuffer(spec.to_json().encode(), dtype=np.uint8)
        self.program.load(text, PAGE_SIZE, self.max_context, threads)
        for name, weight in weights.items():
            self.program.add_weight(np.frombuffer(name.encode(), dtype=np.uint8), weight)
        self.program.finish()
        seqs, pages = max(BATCHES), -(-self.max_context // PAGE_SIZE)
        shuffled = np.random.default_rng(1).permutation(seqs * pages)
        self.block_tables = shuffled.astype(np.int32).reshape(seqs, pages)
        self.history = np.zeros((seqs, self.max_context), dtype=np.int32)
        shape = (spec.num_layers, 2, seqs * pages, PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
        self.kv_cache = device_array(np.zeros(shape, dtype=np.float32))
        self.plan = np.zeros(1, dtype=PLAN.dtype)
        self.rows = np.zeros(seqs, dtype=ROW.dtype)
        self.results = np.zeros(seqs, dtype=RESULT.dtype)
        self.alternatives = np.zeros((seqs, MAX_LOGPROBS), dtype=RESULT.dtype)
        self.records = np.zeros(seqs * RECORD.dtype.itemsize, dtype=np.uint8)

    def step(self, batch: int, first_position: int, num_tokens: int) -> None:
        """One step of ``batch`` equal rows."""
        rows = self.rows[:batch]
        rows["seq"] = np.arange(batch)
        rows["query_start"] = np.arange(batch) * num_tokens
        rows["num_tokens"], rows["first_position"] = num_tokens, first_position
        rows["flags"], rows["repetition_penalty"] = RowFlag.SAMPLE, 1.0
        self.plan["num_rows"], self.plan["num_tokens"] = batch, batch * num_tokens
        self.program.forward(
            self.plan,
            self.rows,
            self.history,
            self.block_tables,
            self.kv_cache,
            self.results,
            self.records,
            self.alternatives,
        )

    def decode_ms(self, prompts: Prompts, new_tokens: int) -> float:
        """Milliseconds per decode step over contexts of PROMPT_TOKENS and up to new_tokens more."""
        batch, length = prompts.shape
        self.history[:batch, :length] = prompts
        self.step(batch, 0, length)
        start = time.perf_counter()
        for position in range(length, length + new_tokens - 1):
            self.step(batch, position, 1)
        return (time.perf_counter() - start) / (new_tokens - 1) * 1e3

    def prefill_rate(self, num_tokens: int) -> float:
        """Prompt tokens per second of one chunk."""
        self.history[0, :num_tokens] = np.arange(num_tokens) % self.vocab_size
        start = time.perf_counter()
        self.step(1, 0, num_tokens)
        return num_tokens / (time.perf_counter() - start)


def transformers_decode(
    spec: ModelSpec, weights: dict[str, Weight], threads: int
) -> Callable[[Prompts, int], float]:
    """The same measurement with transformers: (prompts, new tokens) -> ms per decode step."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.mlp_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.norm_eps,
        rope_theta=spec.rope_theta,
        max_position_embeddings=spec.max_context,
        tie_word_embeddings=spec.tied_embeddings,
        bos_token_id=spec.bos_id,
        eos_token_id=list(spec.eos_ids),
    )
    model: Any = LlamaForCausalLM(config).eval()
    state = {name: torch.from_numpy(weight) for name, weight in _canonical(spec, weights)}
    model.load_state_dict(state, strict=False)
    model.tie_weights()

    def seconds(prompts: Prompts, new_tokens: int) -> float:
        ids = torch.from_numpy(prompts.astype(np.int64))
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - start

    def decode_ms(prompts: Prompts, new_tokens: int) -> float:
        prefill = seconds(prompts, 1)
        return (seconds(prompts, new_tokens) - prefill) / (new_tokens - 1) * 1e3

    return decode_ms


def _canonical(spec: ModelSpec, weights: dict[str, Weight]) -> list[tuple[str, Weight]]:
    """Hugging Face names and views of the device weights."""
    sizes = {"q": spec.q_size, "k": spec.kv_size, "v": spec.kv_size}
    sizes |= {f"{name}_bias": size for name, size in sizes.items()}
    sizes |= {"gate": spec.mlp_size, "up": spec.mlp_size}
    named = []
    for name, weight in weights.items():
        prefix, _, leaf = name.rpartition(".")
        begin = 0
        for part in FUSED.get(leaf, (leaf,)):
            end = begin + sizes.get(part, len(weight))
            named.append((file_name(f"{prefix}.{part}" if prefix else part), weight[begin:end]))
            begin = end
    return named


def bandwidth_gb_s(threads: int) -> float:
    """What this machine reads from memory with plain vector loads, by torch's sum."""
    import torch

    torch.set_num_threads(threads)
    data = torch.ones(1 << 27)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - start) / 1e9)
    return best


def measure(
    source: ModelSource, threads: int, rounds: int, new_tokens: int, alone: bool
) -> dict[str, float]:
    """All figures, medians over ``rounds``."""
    spec = source.spec
    weights = {name: device_array(weight) for name, weight in source.weights()}
    engine = Engine(spec, weights, threads)
    other = None if alone else transformers_decode(spec, weights, threads)
    samples: dict[str, list[float]] = {}
    for index in range(rounds):
        samples.setdefault("memory bandwidth, GB/s", []).append(bandwidth_gb_s(threads))
        for batch in BATCHES:
            rng = np.random.default_rng(index)
            prompts = rng.integers(100, spec.vocab_size, (batch, PROMPT_TOKENS))
            ours = engine.decode_ms(prompts, new_tokens)
            samples.setdefault(f"decode, batch {batch}: ms/step", []).append(ours)
            samples.setdefault(f"decode, batch {batch}: tokens/s", []).append(batch * 1e3 / ours)
            if other is not None:
                theirs = other(prompts, new_tokens)
                key = f"decode, batch {batch}: transformers ms/step"
                samples.setdefault(key, []).append(theirs)
                samples.setdefault(f"decode, batch {batch}: ratio", []).append(theirs / ours)
        for tokens in PREFILL_TOKENS:
            key = f"prefill of {tokens} tokens: tokens/s"
            samples.setdefault(key, []).append(engine.prefill_rate(tokens))
    return {key: statistics.median(values) for key, values in samples.items()}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, metavar="2..200")
    parser.add_argument("--alone", action="store_true", help="do not compare with transformers")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    source = open_model(arguments.model)
    figures = measure(
        source, arguments.threads, arguments.rounds, arguments.new_tokens, arguments.alone
    )
    for key, value in figures.items():
        print(f"{key:44} {value:10.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
