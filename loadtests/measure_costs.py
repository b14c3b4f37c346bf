"""Measures what the control paths take beside the passes, for `blinkbed simulate`.

    python -m loadtests.measure_costs --out engine/simulate/costs/NAME.json

Steady decode of 32 streams on the paced device; the timeline gives the distributions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from engine.config import PATHS
from engine.simulate.costs import Costs
from engine.timeline import Event
from loadtests.compare.store import hardware
from loadtests.steady_steps import BATCH, SteadySteps, steady_steps

NUM_STEPS = 1000
PERCENT = (0.0, 1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 98.0, 99.0, 99.5, 99.9, 100.0)
Found = dict[str, list[int]]


def persistent_costs(steady: SteadySteps) -> Found:
    """The turn, and what a pass takes beyond its length, launching it included."""
    turns, passes = steady.named("scheduler"), steady.named("device")
    return {
        "turn_ns": [one.end_ns - one.start_ns for one in turns.values()],
        "extra_ns": _extra(passes.values(), steady.length_ns),
    }


def host_driven_costs(steady: SteadySteps, depth: int) -> Found:
    """Between passes that follow each other; depth: passes under way."""
    turns, launches = steady.named("host", "publish and plan"), steady.named("host", "launch")
    passes = steady.named("device")
    found: Found = {name: [] for name in ("settle_ns", "turn_ns", "launch_ns", "gap_ns")}
    for step, turn in turns.items():
        if not {step - depth, step - 1, step} <= passes.keys() or step not in launches:
            continue
        found["settle_ns"].append(turn.start_ns - passes[step - depth].end_ns)
        found["turn_ns"].append(turn.end_ns - turn.start_ns)
        launched_ns = launches[step].end_ns
        begins_ns = passes[step].start_ns
        found["launch_ns"].append((begins_ns if depth == 1 else launched_ns) - turn.end_ns)
        if depth > 1 and launched_ns < passes[step - 1].end_ns:
            found["gap_ns"].append(begins_ns - passes[step - 1].end_ns)
    return {**found, "extra_ns": _extra(passes.values(), steady.length_ns)}


def _extra(passes: Iterable[Event], length_ns: float) -> list[int]:
    return [round(one.end_ns - one.start_ns - length_ns) for one in passes]


def costs_of(
    path: str, num_steps: int = NUM_STEPS, length_ns: float | None = None
) -> dict[str, tuple[float, ...]]:
    """Quantiles of a path's costs, ns, at PERCENT. They depend on the pace: a processor that sleeps
    longer between two steps wakes up slower.
    """
    steady = steady_steps(path, num_steps, length_ns)
    if path == "persistent":
        found = persistent_costs(steady)
    else:
        found = host_driven_costs(steady, 1 if path == "sync" else 2)
    return {
        kind: tuple(round(float(one)) for one in np.percentile(np.maximum(values, 0), PERCENT))
        for kind, values in found.items()
        if values
    }


def measure(name: str, paths: Sequence[str]) -> Costs:
    """All paths, one after the other."""
    machine = hardware()
    return Costs(
        name,
        f"steady decode of {BATCH} streams on the paced device, by loadtests.measure_costs",
        f"{machine['num_cpus']} CPUs, {machine['cpu']}; simulated GPU",
        time.strftime("%Y-%m-%d", time.gmtime()),
        PERCENT,
        {path: costs_of(path) for path in paths},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.write_text(measure(out.stem, PATHS).to_json())


if __name__ == "__main__":
    main()
