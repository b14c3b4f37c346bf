"""Who works when: the last steps of a run, written down as JSON at its end."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.errors import UserError


class Event(NamedTuple):
    """Somebody works. Times are ns of CLOCK_MONOTONIC; on a GPU, of its own clock."""

    lane: str  # host, upload, device, download, scheduler
    name: str
    start_ns: int
    end_ns: int
    step: int
    tokens: int
    rows: int


def device_events(records: np.ndarray) -> list[Event]:
    """What the device's scheduler wrote down (state.STEP_RECORD, any order, unused ones zero)."""
    events = []
    for one in np.sort(records[records["ended_ns"] > 0], order="ended_ns").tolist():
        turn_ns, started_ns, ended_ns, *numbers = one
        events.append(Event("scheduler", "turn", turn_ns, started_ns, *numbers))
        events.append(Event("device", "pass", started_ns, ended_ns, *numbers))
    return events


def write_timeline(file: Path, path: str, events: Iterable[Event]) -> None:
    """Write {"path": `path`, "events": [...]}; raises UserError when that cannot be done."""
    listed: list[dict[str, Any]] = [one._asdict() for one in events]
    try:
        file.write_text(json.dumps({"path": path, "events": listed}))
    except OSError as error:
        raise UserError(f"cannot write the timeline to {file}: {error.strerror}") from error
