"""What the path around each step of a run took, from its timeline: to replay it in virtual time.

With the costs of the run's own steps, in their order, a simulation that composes them as the engine
does ends up with the run's own figures, on a machine that other programs disturb, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from engine.model.pace import Pace
from engine.simulate.costs import KINDS, Samples
from engine.timeline import Event

Found = dict[str, dict[int, int]]
"""Nanoseconds by kind and step."""


def recorded_costs(path: str, events: Sequence[Event], pace: Pace) -> Samples:
    """In the order of steps; raises ValueError when the timeline does not have all of them.

    pace: must not depend on contexts, which a timeline does not have.
    """
    found = _persistent(events) if path == "persistent" else _host_driven(events)
    passes = {one.step: one for one in events if one.lane == "device"}
    found["extra_ns"] = {
        step: one.end_ns - one.start_ns - pass_ns(pace, one.tokens) for step, one in passes.items()
    }
    steps = sorted(passes)
    if not steps or steps != list(range(1, len(steps) + 1)):
        raise ValueError(f"the timeline does not have all steps: {steps[:1]} to {steps[-1:]}")
    table = np.zeros((len(KINDS), len(steps)), np.uint64)
    for kind, values in found.items():
        table[KINDS.index(kind)] = [max(0, values.get(step, 0)) for step in steps]
    return table


def pass_ns(pace: Pace, num_tokens: int) -> int:
    """Of a pass over `num_tokens`, without contexts."""
    return round(pace.base_ns[int(np.searchsorted(pace.buckets, num_tokens))])


def _persistent(events: Iterable[Event]) -> Found:
    turns = [one for one in events if one.lane == "scheduler"]
    return {"turn_ns": {one.step: one.end_ns - one.start_ns for one in turns}}


def _host_driven(events: Iterable[Event]) -> Found:
    """Events in the order in which the host noted them: a pass, once its answer is there."""
    found: Found = {kind: {} for kind in ("settle_ns", "turn_ns", "launch_ns", "gap_ns")}
    turns: dict[int, Event] = {}
    launched_ns: dict[int, int] = {}
    free_ns = 0  # when the device was through with the pass before
    settled: Event | None = None
    for one in events:
        if (one.lane, one.name) == ("host", "launch"):
            launched_ns[one.step] = one.end_ns
        elif one.lane == "host":
            turns[one.step] = one
            found["turn_ns"][one.step] = one.end_ns - one.start_ns
            if settled and one.name == "publish and plan":
                found["settle_ns"][settled.step] = one.start_ns - settled.start_ns
            settled = None
        elif one.lane == "device":
            planned_ns = turns[one.step].end_ns
            until_ns = min(launched_ns[one.step], one.start_ns)
            found["launch_ns"][one.step] = until_ns - planned_ns
            found["gap_ns"][one.step] = one.start_ns - max(until_ns, free_ns)
            free_ns = one.end_ns
        elif one.lane == "download":
            settled = one
            found["settle_ns"][one.step] = one.end_ns - one.start_ns
    return found
