"""Random rows for the CUDA sampler, and what engine/model/sampling.py makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.model.adjustments import NOTHING, read_adjustments
from engine.model.sampling import sample_row, write_likeliest
from engine.ring import Address, RequestParams, Ticket, encode_record
from engine.state import RESULT, ROW, RowFlag

MAX_WRONG_SHOWN = 5


def random_rows(
    rng: np.random.Generator, count: int, records: np.ndarray, vocab: int, eos: tuple[int, ...]
) -> np.ndarray:
    """ROW[count], one for each sequence; their records go to `records`, u8[count, slot_bytes]."""
    rows = np.zeros(count, ROW.dtype)
    for i, row in enumerate(rows):
        row["seq"], row["query_start"], row["num_tokens"] = i, i, 1
        row["first_position"], row["num_prompt_tokens"] = rng.integers(20, 400), 10
        row["flags"] = RowFlag.SAMPLE | rng.choice([0, RowFlag.SUPPRESS_STOP])
        row["temperature"] = rng.choice([0, 0.3, 1, 1.7])
        row["top_p"], row["top_k"] = rng.choice([1, 0.9, 0.4]), rng.choice([0, 1, 5, 50])
        row["min_p"], row["uniform"] = rng.choice([0, 0, 0.05]), rng.random()
        row["repetition_penalty"] = rng.choice([1, 1.3])
        row["frequency_penalty"] = rng.choice([0, 0.5])
        row["presence_penalty"] = rng.choice([0, 0.2])
        row["num_logprobs"] = rng.choice([-1, 0, 1, 5, 20])
        row["flags"] |= RowFlag.ALTERNATIVES if row["num_logprobs"] > 0 else 0
        _adjust(records[i], row, rng, vocab, eos)
    return rows


def encode_into(record: np.ndarray, params: RequestParams) -> None:
    """As the scheduler keeps it, u8[slot_bytes]."""
    encoded = encode_record(params, [1], Address(1, 1), 1, Ticket(0, 1))
    record[: len(encoded)] = np.frombuffer(encoded, np.uint8)


def _adjust(
    record: np.ndarray, row: np.void, rng: np.random.Generator, vocab: int, eos: tuple[int, ...]
) -> None:
    """Biases and stop ids for a row: none, a few, or all that fit, some ids among them twice."""
    num_biases, num_stops = int(rng.choice([0, 1, 300])), int(rng.choice([0, 2, 32]))
    ids = rng.integers(0, rng.choice([50, vocab]), num_biases)
    ids[:1] = eos[:1]
    params = RequestParams(
        stop_token_ids=tuple(rng.integers(0, vocab, num_stops).tolist()),
        logit_bias=tuple((int(token), float(rng.normal(0, 4))) for token in ids),
    )
    encode_into(record, params)
    may_stop = not row["flags"] & RowFlag.SUPPRESS_STOP
    row["num_adjusted"] = num_biases + (0 if may_stop else num_stops)


class Agreement:
    """Counts draws and lists of alternatives that are those of the NumPy sampler."""

    def __init__(self, eos_ids: tuple[int, ...]) -> None:
        self._eos_ids = eos_ids
        self.equal = self.total = self.wrong_lists = 0
        self.worst_logprob_error = 0.0
        self.wrong: list[str] = []

    def add(
        self,
        logits: np.ndarray,
        row: np.void,
        known: np.ndarray,
        record: np.ndarray,
        result: np.void,
        alternatives: np.ndarray,
    ) -> None:
        """One row: float32[vocab], ROW, its sequence's ids, its record, what the GPU made of it."""
        adjustments = read_adjustments(record) if row["num_adjusted"] else NOTHING
        want = sample_row(logits, row, known, self._eos_ids, adjustments)
        token = int(result["token"])
        self.total += 1
        self.equal += token == want
        if token != want and len(self.wrong) < MAX_WRONG_SHOWN:
            self.wrong.append(f"{row} wanted {want} got {result}")
        x = logits.astype(np.float64)
        total = float(x.max() + np.log(np.exp(x - x.max()).sum()))
        if token >= 0:
            self._compare(result["logprob"], x[token] - total)
        count = max(int(row["num_logprobs"]), 0)
        if count:
            likeliest = np.zeros(count, RESULT.dtype)
            write_likeliest(logits, total, count, likeliest)
            self.wrong_lists += bool((alternatives["token"][:count] != likeliest["token"]).any())
            self._compare(alternatives["logprob"][:count], likeliest["logprob"])

    def _compare(self, found: Any, wanted: Any) -> None:
        found, wanted = np.atleast_1d(found), np.atleast_1d(wanted)
        finite = np.isfinite(wanted)
        error = np.abs(found[finite] - wanted[finite]).max(initial=0.0)
        same = (found[~finite] == wanted[~finite]).all()
        self.worst_logprob_error = max(self.worst_logprob_error, float(error if same else np.inf))

    def summary(self) -> dict[str, Any]:
        return {
            "equal": self.equal,
            "of": self.total,
            "wrong_lists_of_alternatives": self.wrong_lists,
            "worst_logprob_error": self.worst_logprob_error,
            "wrong": self.wrong,
        }
