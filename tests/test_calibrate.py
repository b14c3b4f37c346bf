"""A profile of step times comes out of measured steps."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import engine
from engine.calibrate import (
    DECODE_CONTEXTS,
    Fit,
    Sample,
    Step,
    fit,
    profile_of,
    steps_to_measure,
)

PROFILES = Path(engine.__file__).parent / "profiles"
BUCKETS = (8, 64, 256, 1024)
TRUE = Fit(BUCKETS, (4e6, 4.5e6, 9e6, 20e6), 31.0, 0.9, 850.0, 0, 0)
MAX_ROWS, MAX_KV_TOKENS = 64, 1 << 16


def steps() -> list[Step]:
    return list(steps_to_measure(BUCKETS, MAX_ROWS, MAX_KV_TOKENS))


def samples(noise: float = 0.0) -> list[Sample]:
    times = [round(TRUE.step_ns(step) * (1 + noise * (-1) ** i)) for i, step in enumerate(steps())]
    return [Sample(step, ns, ns, ns) for step, ns in zip(steps(), times, strict=True)]


def test_the_fit_finds_the_numbers_that_made_the_times() -> None:
    found = fit(samples(), BUCKETS)
    assert found.base_ns == pytest.approx(TRUE.base_ns, rel=1e-4)
    assert found.ns_per_decode_context == pytest.approx(31.0, rel=1e-3)
    assert found.ns_per_prefill_pair == pytest.approx(0.9, rel=1e-3)
    assert found.ns_per_prefill_context == pytest.approx(850, rel=1e-2)
    assert found.error_p99 < 1e-4


def test_the_fit_states_the_error_of_noisy_times() -> None:
    found = fit(samples(noise=0.03), BUCKETS)
    assert 0.01 < found.error_mean < 0.04
    assert found.error_mean <= found.error_p99


def test_a_bucket_without_a_sample_is_refused() -> None:
    narrow = [sample for sample in samples() if sample.step.num_tokens <= 256]
    with pytest.raises(ValueError, match="bucket of 1024 tokens"):
        fit(narrow, BUCKETS)


def test_steps_fill_every_bucket_and_keep_to_the_limits() -> None:
    assert {step.num_tokens for step in steps()} == set(BUCKETS)
    assert max(step.decode_rows for step in steps()) == MAX_ROWS
    assert max(step.kv_tokens for step in steps()) <= MAX_KV_TOKENS
    assert {step.decode_context for step in steps()} >= set(DECODE_CONTEXTS[:3])
    assert any(step.decode_rows and step.prefill_tokens for step in steps())


def test_a_step_wider_than_all_buckets_is_refused() -> None:
    with pytest.raises(ValueError, match="1025 tokens"):
        TRUE.step_ns(Step(0, 0, 1025))


def test_pairs_of_a_chunk_count_what_came_before() -> None:
    assert Step(0, 0, 3, prefill_offset=10).prefill_pairs == 11 + 12 + 13


def test_the_profile_says_where_it_was_measured() -> None:
    made = profile_of(samples(), fit(samples(), BUCKETS), {"hardware": "a GPU", "model": "m"})
    assert made["measured"] is True
    assert (made["hardware"], made["model"]) == ("a GPU", "m")
    assert len(made["samples"]) == len(steps())


def test_the_shipped_profile_is_what_its_samples_give() -> None:
    shipped = json.loads((PROFILES / "8b-h200.json").read_text())
    assert shipped["measured"] is True
    names = [field.name for field in dataclasses.fields(Step)]
    measured = [
        Sample(Step(*(one[n] for n in names)), one["step_ns"], one["p10_ns"], one["p90_ns"])
        for one in shipped["samples"]
    ]
    again = dataclasses.asdict(fit(measured, shipped["buckets"]))
    for name, value in again.items():
        assert shipped[name] == pytest.approx(list(value) if name == "buckets" else value), name
    assert again["error_mean"] < 0.03


@pytest.mark.skipif(
    importlib.util.find_spec("cupy") is not None, reason="needs a machine without CuPy"
)
def test_without_cupy_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine.cli", "calibrate", "--out", str(tmp_path / "p.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "pip install 'blinkbed[cuda]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "p.json").exists()
