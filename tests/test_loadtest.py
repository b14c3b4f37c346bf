"""The load test judged against a server whose times and faults are known."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtests.run import Gates, Load, Outcome, main, percentile, run_locust

STUB = Path(__file__).with_name("stub_chat.py")


@contextmanager
def stub(mode: str) -> Iterator[str]:
    process = subprocess.Popen([sys.executable, str(STUB), mode], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_ttft_and_tpot_are_those_of_the_text_alone() -> None:
    with stub("normal") as url:
        outcome = run_locust(url, Load(users=2, seconds=8, max_tokens=21))
    assert outcome.num_failures == 0
    assert outcome.num_requests >= 4
    assert outcome.num_tokens == 21 * outcome.num_requests
    # The least of them: a busy machine only ever adds.
    assert min(outcome.ttft_ms) == pytest.approx(300, abs=10)
    assert percentile(outcome.tpot_ms, 50) == pytest.approx(40, abs=5)


@pytest.mark.parametrize("mode", ["error", "cut", "silent-end", "refuse"])
def test_a_stream_that_is_not_complete_is_a_failure(mode: str) -> None:
    with stub(mode) as url:
        outcome = run_locust(url, Load(users=1, seconds=8, max_tokens=21))
    assert outcome.num_requests >= 1
    assert outcome.num_failures == outcome.num_requests
    assert outcome.tpot_ms == []


def test_exit_status_follows_the_error_gate(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--users=1", "--seconds=8", "--max-ttft-p99-ms=60000"]
    with stub("normal") as url:
        assert main(["--url", url, *load]) == 0
    with stub("error") as url:
        assert main(["--url", url, *load]) == 1
    assert "of the requests failed" in capsys.readouterr().err


def test_exit_status_follows_the_ttft_gate(capsys: pytest.CaptureFixture[str]) -> None:
    with stub("normal") as url:
        assert main(["--url", url, "--users=1", "--seconds=8", "--max-ttft-p99-ms=200"]) == 1
    assert "TTFT p99" in capsys.readouterr().err


def test_no_request_at_all_breaks_a_gate() -> None:
    nothing = Outcome(0, 0, 0, 0.0, [], [], {})
    assert nothing.broken_gates(Gates(1.0, 1e9)) == ["no request was made"]


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, rank) for rank in (50, 90, 99, 100)] == [50, 90, 99, 100]
    assert percentile([7.0], 99) == 7.0


def test_samples_are_json(tmp_path: Path) -> None:
    samples = {
        "num_requests": 2,
        "num_failures": 1,
        "num_tokens": 9,
        "first_s": 1.0,
        "last_s": 2.0,
        "ttft_ms": [3.0, 1.0],
        "tpot_ms": [],
        "failures": {"cut": 1},
    }
    outcome = Outcome.from_samples(json.loads(json.dumps(samples)))
    assert outcome.ttft_ms == [1.0, 3.0]
    assert "failure, 1 times: cut" in outcome.table()
