"""`serve --timeline` on every path: who works when, on one clock."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest

from engine import state
from engine.config import PATHS
from engine.errors import UserError
from engine.timeline import device_events, write_timeline
from tests.chat_client import complete
from tests.server import start_server

LANES = {
    "persistent": {"scheduler", "device"},
    "sync": {"host", "upload", "device", "download"},
    "async": {"host", "upload", "device", "download"},
}
NUM_TOKENS = 20


@pytest.mark.parametrize("path", PATHS)
def test_the_server_writes_its_steps(path: str, tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    began_ns = time.monotonic_ns()
    with start_server(path=path, timeline=str(file)) as server:
        complete(server.url, prompt="abc", max_tokens=NUM_TOKENS, ignore_eos=True)
        assert server.stack.stop() == 0
    written = json.loads(file.read_text())
    events = written["events"]
    assert written["path"] == path
    assert {one["lane"] for one in events} == LANES[path]
    assert all(began_ns < one["start_ns"] <= one["end_ns"] for one in events)
    assert all(one["end_ns"] < time.monotonic_ns() for one in events)
    passes = [one for one in events if one["lane"] == "device"]
    steps = [one["step"] for one in passes]
    assert len(passes) >= NUM_TOKENS
    assert steps == sorted(set(steps))
    assert all(a["end_ns"] <= b["start_ns"] for a, b in itertools.pairwise(passes))
    assert all(one["rows"] == 1 and one["tokens"] >= 1 for one in passes)


def test_records_come_in_order_and_unused_ones_not() -> None:
    records = np.zeros(4, state.STEP_RECORD.dtype)
    records[2] = (10, 20, 30, 1, 5, 2)
    records[0] = (30, 35, 40, 2, 2, 2)
    assert [tuple(one) for one in device_events(records)] == [
        ("scheduler", "turn", 10, 20, 1, 5, 2),
        ("device", "pass", 20, 30, 1, 5, 2),
        ("scheduler", "turn", 30, 35, 2, 2, 2),
        ("device", "pass", 35, 40, 2, 2, 2),
    ]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write the timeline to .*: No such file"):
        write_timeline(tmp_path / "no/folder", "sync", [])
