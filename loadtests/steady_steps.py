"""Steady decode on the paced device with steps of one length, and its timeline: whatever a step has
beyond that length is the path's, or the emulation's.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.config import ModelConfig, RingConfig, SchedulerConfig, ServeConfig
from engine.model.pace import TERMS, Pace
from engine.timeline import Event
from engine.workload import Requests
from loadtests.paced_run import PacedRun, play

PROFILE = "8b-h200"
BATCH, NUM_PROMPT = 32, 16
MAX_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class SteadySteps:
    """Events of the steps in which all streams decode, and how long each pass should have been."""

    path: str
    length_ns: float
    events: list[Event]
    run: PacedRun

    def named(self, lane: str, *names: str) -> dict[int, Event]:
        """By step; of all names when none is given."""
        return {
            one.step: one
            for one in self.events
            if one.lane == lane and (not names or one.name in names)
        }


def decode_ns() -> float:
    """How long a pass of BATCH rows takes without context, by PROFILE."""
    pace = Pace.load(PROFILE)
    pairs = zip(pace.buckets, pace.base_ns, strict=True)
    return next(ns for size, ns in pairs if size >= BATCH)


def flat_profile(folder: Path, length_ns: float) -> Path:
    """A profile of which every step takes `length_ns`."""
    fields = {
        "hardware": f"a device whose steps all take {length_ns / 1e6:.3f} ms",
        "measured": False,
        "date": "-",
        "buckets": [MAX_CONTEXT],
        "base_ns": [length_ns],
        **dict.fromkeys(TERMS, 0.0),
    }
    path = folder / "flat.json"
    path.write_text(json.dumps(fields))
    return path


def steady_steps(path: str, num_steps: int, length_ns: float | None = None) -> SteadySteps:
    """BATCH streams of `num_steps` tokens; raises RuntimeError when there is no such step.

    length_ns: of every step, as an 8B model on an H200 would take unless given.
    """
    length_ns = length_ns or decode_ns()
    with tempfile.TemporaryDirectory() as folder:
        profile = flat_profile(Path(folder), length_ns)
        timeline = Path(folder, "timeline.json")
        config = ServeConfig(
            model=ModelConfig(f"paced:{profile}"),
            ring=RingConfig(num_slots=2 * BATCH, token_ring_entries=65536),
            scheduler=SchedulerConfig(
                num_pages=BATCH * MAX_CONTEXT // 16,
                max_running=BATCH,
                max_step_tokens=2048,
                max_context=MAX_CONTEXT,
            ),
            path=path,
            timeline=str(timeline),
        )
        sizes = np.full(BATCH, NUM_PROMPT), np.full(BATCH, num_steps)
        run = play(config, Requests(np.zeros(BATCH), *sizes))
        listed = [Event(**one) for one in json.loads(timeline.read_text())["events"]]
    events = [one for one in listed if one.rows == one.tokens == BATCH]
    if len(events) < num_steps:
        raise RuntimeError(f"only {len(events)} events of steps with {BATCH} rows")
    return SteadySteps(path, length_ns, events, run)
