"""Drives the device program with plain arrays: a tiny scheduler over shuffled KV pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.model.program import Program
from engine.model.spec import ModelSpec, ReadWeight, read_device_weights
from engine.protocol import MAX_LOGPROBS, RECORD
from engine.state import PLAN, RESULT, ROW, RowFlag


@dataclass
class Sequence:
    """One request of the driver."""

    prompt: list[int]
    max_tokens: int
    arrival_step: int = 0
    parameters: dict[str, float] = field(default_factory=dict)
    uniforms: list[float] = field(default_factory=list)
    computed: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)


class Driver:
    """A device with one model and ``num_seqs`` sequence slots."""

    def __init__(
        self,
        spec: ModelSpec,
        read: ReadWeight,
        *,
        num_seqs: int = 8,
        max_context: int = 256,
        page_size: int = 16,
        num_threads: int = 2,
        plain_torch: bool = False,
    ) -> None:
        self.spec, self.page_size, self.max_context = spec, page_size, max_context
        self.program = Program()
        text = np.frombuffer(spec.to_json().encode(), dtype=np.uint8)
        self.program.load(text, page_size, max_context, num_threads, int(plain_torch))
        for name, weight in read_device_weights(spec, read):
            self.program.add_weight(np.frombuffer(name.encode(), dtype=np.uint8), weight)
        self.program.finish()
        pages_per_seq = -(-max_context // page_size)
        num_pages = num_seqs * pages_per_seq
        shuffled = np.random.default_rng(5).permutation(num_pages).astype(np.int32)
        self.block_tables = shuffled.reshape(num_seqs, pages_per_seq)
        self.history = np.zeros((num_seqs, max_context), dtype=np.int32)
        shape = (spec.num_layers, 2, num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        # Pages hold garbage until written: what leaks out of them would show.
        self.kv_cache = np.full(shape, np.nan, dtype=np.float32)
        self.plan = np.zeros(1, dtype=PLAN.dtype)
        self.rows = np.zeros(num_seqs, dtype=ROW.dtype)
        self.results = np.zeros(num_seqs, dtype=RESULT.dtype)
        self.alternatives = np.zeros((num_seqs, MAX_LOGPROBS), dtype=RESULT.dtype)
        self.records = np.zeros(num_seqs * RECORD.dtype.itemsize, dtype=np.uint8)

    def step(self, work: list[tuple[int, Sequence, int]]) -> None:
        """Run ``num_tokens`` of each (slot, sequence, num_tokens); decode rows come first."""
        start = 0
        for index, (slot, sequence, num_tokens) in enumerate(work):
            row = self.rows[index]
            row["seq"], row["query_start"], row["num_tokens"] = slot, start, num_tokens
            row["first_position"] = sequence.computed
            known = sequence.prompt + sequence.output
            self.history[slot, : len(known)] = known
            samples = sequence.computed + num_tokens == sequence.length
            row["flags"] = RowFlag.SAMPLE if samples else 0
            row["temperature"], row["top_p"], row["repetition_penalty"] = 0.0, 1.0, 1.0
            row["num_prompt_tokens"] = len(sequence.prompt)
            for key, value in sequence.parameters.items():
                row[key] = value
            if sequence.uniforms:
                row["uniform"] = sequence.uniforms[len(sequence.output)]
            start += num_tokens
        self.plan["num_rows"], self.plan["num_tokens"] = len(work), start
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
        for index, (slot, sequence, num_tokens) in enumerate(work):
            sequence.computed += num_tokens
            if sequence.computed == sequence.length:
                token = int(self.results["token"][index])
                sequence.output.append(token)
                sequence.logprobs.append(float(self.results["logprob"][index]))
                assert self.history[slot, sequence.computed] == max(token, 0)

    def run(self, sequences: list[Sequence], *, chunk: int = 0) -> None:
        """Run all to their end; prompts in chunks of at most ``chunk`` tokens, 0: whole."""
        step = 0
        while any(len(s.output) < s.max_tokens for s in sequences):
            live = [
                (slot, s, min(s.length - s.computed, chunk or s.length))
                for slot, s in enumerate(sequences)
                if s.arrival_step <= step and len(s.output) < s.max_tokens
            ]
            self.step(sorted(live, key=lambda item: item[2] > 1))
            step += 1
