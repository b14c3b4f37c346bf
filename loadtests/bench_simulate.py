"""How fast the simulation is, and how far from the paced device in real time.

    python -m loadtests.bench_simulate [agreement]

Speed: requests of a ShareGPT-like load on one core, the making of the load included; a million of
them, and the memory that this takes. Agreement, with the word (5 minutes): the 8B profile, 32
requests/s, on each path, beside the simulation with costs measured right before.
"""

from __future__ import annotations

import json
import resource
import sys
import time

from engine.config import PATHS, ModelConfig, ServeConfig
from engine.model.pace import Pace
from engine.simulate.command import SECTIONS
from engine.simulate.costs import Costs
from engine.simulate.simulation import Setup, simulate
from engine.workload import poisson_requests
from loadtests.agreement import compare
from loadtests.measure_costs import PERCENT, costs_of

PROFILE, COSTS = "8b-h200", "sim"
RATE_PER_S = 24.0
NUM_REQUESTS, MANY_REQUESTS = 100_000, 1_000_000
AGREEMENT_RATE_PER_S, AGREEMENT_REQUESTS = 32.0, 3000
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
    """Simulated over real, less 1, and how far chance carries the figure, in percent."""
    numbers: Numbers = {}
    for path in PATHS:
        setup = setup_of(path)
        config = ServeConfig(
            model=ModelConfig(f"paced:{PROFILE}"),
            ring=setup.ring,
            scheduler=setup.scheduler,
            path=path,
        )
        requests = poisson_requests(
            AGREEMENT_RATE_PER_S, AGREEMENT_REQUESTS, 1, max_context=setup.scheduler.max_context
        )
        costs = Costs("here", "", "", "", PERCENT, {path: costs_of(path)})
        found = compare(config, next(requests), costs.samples(path))
        numbers[f"{path}_late_percent"] = round(100 * found.real.late_share, 3)
        spreads = found.spreads
        for name, difference in found.differences.items():
            numbers[f"{path}_{name}_percent"] = round(100 * difference, 2)
            numbers[f"{path}_{name}_chance_percent"] = round(100 * spreads[name], 2)
    return numbers


if __name__ == "__main__":
    print(json.dumps(measure_agreement() if "agreement" in sys.argv else measure_speed()))
