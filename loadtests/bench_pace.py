"""How well the paced device keeps its profile on this machine, idle.

    python -m loadtests.bench_pace

32 streams decode, every pass as long as one of 32 tokens of an 8B model on an H200. The error of a
pass is what the device's own clock shows beyond that; on the persistent path from the end of the
plan to the begin of the next turn, so that the launch of the graph is in it. Idle share: the time
in which no pass should run, of all time.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence

import numpy as np

from engine.config import PATHS
from loadtests.steady_steps import SteadySteps, steady_steps

NUM_STEPS = 1000


def figures(steady: SteadySteps) -> dict[str, float | int]:
    """Error of the passes in percent of their length, and the idle share."""
    passes = sorted(steady.named("device").items())
    errors = np.array([one.end_ns - one.start_ns for _, one in passes]) / steady.length_ns - 1
    following = [
        later.start_ns - earlier.start_ns
        for (step, earlier), (next_step, later) in itertools.pairwise(passes)
        if next_step == step + 1
    ]
    p50, p99 = np.percentile(np.abs(errors), [50, 99])
    return {
        "steps": len(passes),
        "length_ms": round(steady.length_ns / 1e6, 3),
        "error_mean_percent": round(100 * float(np.abs(errors).mean()), 4),
        "error_p50_percent": round(100 * float(p50), 4),
        "error_p99_percent": round(100 * float(p99), 4),
        "error_max_percent": round(100 * float(np.abs(errors).max()), 4),
        "late_steps": steady.run.late_steps,
        "idle_percent": round(100 * (1 - steady.length_ns / float(np.mean(following))), 4),
    }


def measure(paths: Sequence[str]) -> dict[str, float | int]:
    """All figures of all paths, in one mapping."""
    return {
        f"{path}_{name}": value
        for path in paths
        for name, value in figures(steady_steps(path, NUM_STEPS)).items()
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1:] or PATHS)))
