"""The CUDA sampler's source, run on the CPU, chooses as engine/model/sampling.py does."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import native
from engine.config import RingConfig, SchedulerConfig
from engine.protocol import MAX_LOGPROBS
from engine.ring import RequestParams
from engine.ring_library import CSRC
from engine.scheduler_memory import ModelLimits, SchedulerMemory
from engine.state import RESULT, ROW, RowFlag
from tests.sampler_cases import Agreement, encode_into, random_rows

HERE = Path(__file__).parent
ROWS, SLOTS, VOCAB, CONTEXT, EOS_IDS = 6, 8, 1200, 512, (7, 2)
MISSES = 1  # of a step: tokens 5e-6 apart count as equals
UNTOUCHED = np.array((-5, 0.0), RESULT.dtype)


class Sampler:
    """The kernels over NumPy memory; the last call's results and alternatives."""

    def __init__(self) -> None:
        path = native.build_library(
            [HERE / "csrc" / "sampler_fibers.cpp"],
            include_dirs=[CSRC, HERE / "csrc", CSRC.parent / "model" / "kernels"],
            extra_flags=("-Wno-unknown-pragmas",),  # unroll
            name="sampler-fibers",
        )
        self._library = ctypes.CDLL(str(path))
        scheduler = SchedulerConfig(
            num_pages=ROWS, max_running=ROWS, max_step_tokens=ROWS, max_context=CONTEXT
        )
        ring = RingConfig(num_slots=SLOTS, token_ring_entries=32)
        limits = ModelLimits(VOCAB, CONTEXT, EOS_IDS)
        window = np.zeros(1 << 20, np.uint8)
        self.memory = SchedulerMemory(np, window, ring, scheduler, limits, 1)
        self.arrays = self.memory.arrays
        self.records = self.arrays["records"].reshape(SLOTS, -1)

    def __call__(self, logits: np.ndarray, rows: np.ndarray) -> tuple[Any, Any]:
        self.arrays["rows"][:] = rows
        self.arrays["plan"]["num_rows"] = ROWS
        self.arrays["alternatives"][:] = UNTOUCHED
        changed, raw = logits.copy(), np.zeros_like(logits)
        seen = np.zeros(logits.shape, np.uint32)
        self._library.bb_sample(
            ctypes.c_void_p(self.memory.state.ctypes.data),
            ROWS,
            *(ctypes.c_void_p(array.ctypes.data) for array in (changed, raw, seen)),
        )
        assert not seen.any()
        return self.arrays["results"], self.arrays["alternatives"]


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler()


def random_logits(rng: np.random.Generator) -> np.ndarray:
    scale = rng.choice([1.0, 4.0], ROWS)[:, None].astype(np.float32)
    logits: np.ndarray = rng.standard_normal((ROWS, VOCAB)).astype(np.float32) * scale
    return logits


def agreement(sampler: Sampler, rng: np.random.Generator, logits: np.ndarray) -> Agreement:
    rows = random_rows(rng, ROWS, sampler.records, VOCAB, EOS_IDS)
    history = sampler.arrays["history"]
    history[:] = rng.integers(0, VOCAB, history.shape)
    history[:, ::3] = rng.integers(0, 50, history[:, ::3].shape)
    results, alternatives = sampler(logits, rows)
    found = Agreement(EOS_IDS)
    for i, row in enumerate(rows):
        known = history[i, : int(row["first_position"]) + 1]
        found.add(logits[i], row, known, sampler.records[i], results[i], alternatives[i])
        assert (alternatives[i, max(int(row["num_logprobs"]), 0) :] == UNTOUCHED).all()
    return found


def test_draws_and_alternatives_are_the_numpy_samplers(sampler: Sampler) -> None:
    rng = np.random.default_rng(0)
    found = agreement(sampler, rng, random_logits(rng))
    assert found.equal >= found.total - MISSES, found.wrong
    assert found.wrong_lists == 0
    assert found.worst_logprob_error < 1e-5


def test_what_records_adjust_decides_the_draw(sampler: Sampler) -> None:
    """An own stop id, a known token forced, the last of two biases, a token forbidden."""
    logits = random_logits(np.random.default_rng(6))
    best = logits.argmax(1).tolist()
    asked = [
        RequestParams(stop_token_ids=(best[0],), min_tokens=5),
        RequestParams(logit_bias=((33, 100.0),)),
        RequestParams(logit_bias=((best[2], -300.0), (9, 1.0), (best[2], 50.0))),
        RequestParams(logit_bias=((best[3], -100.0),)),
    ]
    rows = np.zeros(ROWS, ROW.dtype)
    for i, (row, params) in enumerate(zip(rows, asked, strict=False)):
        row["seq"], row["num_tokens"], row["flags"] = i, 1, RowFlag.SAMPLE
        row["first_position"], row["num_prompt_tokens"], row["num_adjusted"] = 40, 10, 1
        row["repetition_penalty"], row["presence_penalty"] = 1.3, 0.2
        encode_into(sampler.records[i], params)
    rows[0]["flags"] |= RowFlag.SUPPRESS_STOP
    history = sampler.arrays["history"]
    history[:] = 33
    results, alternatives = sampler(logits, rows)
    found = Agreement(EOS_IDS)
    for i in range(len(asked)):
        known = history[i, :41]
        found.add(logits[i], rows[i], known, sampler.records[i], results[i], alternatives[i])
    assert results["token"][1:3].tolist() == [33, best[2]]
    assert results["token"][0] != best[0]
    assert results["token"][3] != best[3]
    assert found.equal == found.total == 4, found.wrong
    assert found.worst_logprob_error < 1e-5


def test_ties_and_forbidden_tokens_are_in_order(sampler: Sampler) -> None:
    rng = np.random.default_rng(7)
    logits = random_logits(rng)
    logits[0] = 0.0
    logits[1] = np.round(logits[1])
    logits[2, 15:] = -np.inf  # whole parts of the row
    logits[3, ::2] = -np.inf
    found = agreement(sampler, rng, logits)
    assert found.wrong_lists == 0
    assert found.worst_logprob_error < 1e-5
    assert found.equal >= found.total - MISSES, found.wrong


def test_a_row_that_is_no_distribution_has_no_token(sampler: Sampler) -> None:
    rng = np.random.default_rng(8)
    logits = random_logits(rng)
    logits[0, 5], logits[1, 1100], logits[2] = np.nan, np.inf, -np.inf
    rows = random_rows(rng, ROWS, sampler.records, VOCAB, EOS_IDS)
    rows["flags"] |= np.uint32(RowFlag.ALTERNATIVES)
    rows["num_logprobs"] = MAX_LOGPROBS
    results, alternatives = sampler(logits, rows)
    assert results["token"][:3].tolist() == [-1] * 3
    assert np.isnan(results["logprob"][:3]).all()
    assert (alternatives[:3] == UNTOUCHED).all()
    assert (results["token"][3:] >= 0).all()
