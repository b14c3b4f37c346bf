"""Arrivals and lengths: the same for the same seed, in pieces or whole, and traces from files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from engine import workload
from engine.errors import UserError
from engine.workload import LengthTable, arrivals, lengths, poisson_requests, trace_requests


def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "CHUNK", 7)
    pieces = list(poisson_requests(5.0, 100, 3, max_context=512))
    assert [len(piece) for piece in pieces] == [7] * 14 + [2]
    times = np.concatenate([piece.arrival_s for piece in pieces])
    sizes = np.concatenate([np.stack([p.prompt_tokens, p.output_tokens], 1) for p in pieces])
    assert np.array_equal(times, arrivals(5.0, 100, 3))
    assert np.array_equal(sizes, lengths(100, 3, max_context=512))


def test_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    gaps = np.diff(arrivals(20.0, 50_000, 1))
    assert np.all(gaps > 0)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.02)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.02)
    assert not np.array_equal(arrivals(20.0, 10, 1), arrivals(20.0, 10, 2))


def test_lengths_follow_the_table_and_fit_the_context() -> None:
    table = LengthTable.load()
    drawn = lengths(50_000, 1, max_context=4096)
    for column, known in zip(drawn.T, (table.prompt_tokens, table.output_tokens), strict=True):
        assert np.percentile(column, [10, 50, 90]) == pytest.approx(
            np.interp([10, 50, 90], table.percent, known), rel=0.05, abs=1
        )
    assert abs(np.asarray(np.corrcoef(drawn.T))[0, 1]) < 0.02
    short = lengths(50_000, 1, max_context=64)
    assert short.min() >= 1
    assert short[:, 0].max() == 32
    assert short.sum(axis=1).max() == 64


def test_a_trace_is_read_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "CHUNK", 2)
    rows = [(0.0, 3, 4), (0.5, 1, 1), (0.5, 9, 2)]
    names = ("arrival_s", "prompt_tokens", "output_tokens")
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    pieces = list(trace_requests(file, max_context=16))
    assert [len(piece) for piece in pieces] == [2, 1]
    found = [
        (float(a), int(b), int(c))
        for p in pieces
        for a, b, c in zip(p.arrival_s, p.prompt_tokens, p.output_tokens, strict=True)
    ]
    assert found == rows


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"arrival_s": 2, "prompt_tokens": 1, "output_tokens": 1', "line 3: a request has"),
        ("[]", "line 3: a request has"),
        ('{"arrival_s": 2, "prompt_tokens": 1}', "output_tokens"),
        ('{"arrival_s": NaN, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s=nan"),
        ('{"arrival_s": 0.5, "prompt_tokens": 1, "output_tokens": 1}', "before the one above"),
        ('{"arrival_s": 2, "prompt_tokens": 0, "output_tokens": 1}', "0 and 1 tokens"),
        ('{"arrival_s": 2, "prompt_tokens": 9, "output_tokens": 8}', "--max-context=16"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, line: str, words: str) -> None:
    good = '{"arrival_s": 1, "prompt_tokens": 8, "output_tokens": 8}\n'
    file = tmp_path / "trace.jsonl"
    file.write_text(good + good + line + "\n")
    with pytest.raises(UserError, match=words):
        list(trace_requests(file, max_context=16))


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    good = {"name": "x", "percent": [0, 100], "prompt_tokens": [1, 2], "output_tokens": [1, 2]}
    file.write_text(json.dumps(good))
    assert LengthTable.load(file).prompt_tokens == (1.0, 2.0)
    for change in ({"percent": [100, 0]}, {"prompt_tokens": [1]}, {"output_tokens": None}):
        file.write_text(json.dumps({**good, **change}))
        with pytest.raises(UserError, match=r"lengths\.json"):
            LengthTable.load(file)
