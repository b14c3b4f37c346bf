"""How fast the simulation is, and how far from the paced device in real time.

    python -m loadtests.bench_simulate [agreement]

Speed: requests of a ShareGPT-like load on one core, the making of the load included; a million of
them, and the memory that this takes. Agreement, with the word (5 minutes): the 8B profile, 32
requests/s, some seeds on each path, beside simulations with the costs of the very run.
"""

from __future__ import annotations

import json
import resource
import sys
import time

import numpy as np

from engine.config import PATHS
from engine.model.pace import Pace
from engine.simulate.command import SECTIONS
from engine.simulate.costs import Costs
from engine.simulate.simulation import Setup, simulate
from engine.workload import poisson_requests
from loadtests import agreement

PROFILE, COSTS = "8b-h200", "sim"
RATE_PER_S = 24.0
NUM_REQUESTS, MANY_REQUESTS = 100_000, 1_000_000
AGREEMENT_REQUESTS, AGREEMENT_SEEDS = 400, range(1, 6)
Numbers = dict[str, float | int]


def setup_of(path: str) -> Setup:
    """The default engine of `blinkbed simulate`."""
    ring, scheduler = SECTIONS.values()
    costs = Costs.load(COSTS).samples(path)
    return Setup(path, ring, scheduler, Pace.load(PROFILE), costs)  # type: ignore[arg-type]


def speed(path: str, num_requests: int) -> float:
    """Requests for each second of processor time."""
    setup = setup_of(path)
    began_s = time.process_time()
    result = simulate(
        setup,
        poisson_requests(RATE_PER_S, num_requests, 1, max_context=setup.scheduler.max_context),
    )
    assert result.num_requests == num_requests
    return num_requests / (time.process_time() - began_s)


def peak_mib() -> float:
    """The most memory that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_speed() -> Numbers:
    """Speed on each path, and memory before and after a million requests."""
    numbers: Numbers = {
        f"{path}_requests_per_s": round(speed(path, NUM_REQUESTS)) for path in PATHS
    }
    before = peak_mib()
    began_s = time.process_time()
    speed("persistent", MANY_REQUESTS)
    return {
        **numbers,
        "million_cpu_s": round(time.process_time() - began_s, 1),
        "million_peak_mib": round(peak_mib(), 1),
        "million_further_mib": round(peak_mib() - before, 1),
    }


def measure_agreement() -> Numbers:
    """In percent, of all runs. Replay over the run in real time: the median of the differences, and
    the largest. Draws: the mean of their medians' differences, and how far chance carries one.
    """
    numbers: Numbers = {}
    for path in PATHS:
        runs = [agreement.run(path, AGREEMENT_REQUESTS, seed) for seed in AGREEMENT_SEEDS]
        numbers[f"{path}_late_percent"] = _percent(np.mean([one.real.late_share for one in runs]))
        for name in runs[0].differences:
            replayed = [abs(one.differences[name]) for one in runs]
            numbers[f"{path}_{name}_replayed_percent"] = _percent(np.median(replayed))
            numbers[f"{path}_{name}_replayed_most_percent"] = _percent(max(replayed))
            drawn = [one.drawn_differences[name] for one in runs]
            numbers[f"{path}_{name}_drawn_percent"] = _percent(np.mean(drawn))
            chance = [one.chance[name] for one in runs]
            numbers[f"{path}_{name}_chance_percent"] = _percent(np.mean(chance))
    return numbers


def _percent(share: float | np.floating) -> float:
    return round(100 * float(share), 2)


if __name__ == "__main__":
    print(json.dumps(measure_agreement() if "agreement" in sys.argv else measure_speed()))
