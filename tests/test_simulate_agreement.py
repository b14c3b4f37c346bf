"""The simulation against the paced device in real time."""

from __future__ import annotations

import json
from pathlib import Path

from engine.config import ModelConfig, RingConfig, SchedulerConfig, ServeConfig
from engine.model.pace import PROFILES, TERMS
from engine.simulate.costs import Costs
from engine.workload import LengthTable, poisson_requests
from loadtests.agreement import Agreement, compare
from loadtests.measure_costs import PERCENT, costs_of

FASTER = 8  # than the profile: as many steps in a test as an 8B model takes in a minute
RATE_PER_S, NUM_REQUESTS = 500.0, 3000
SHORT = LengthTable("short", (0, 50, 90, 100), (4, 40, 150, 300), (4, 25, 60, 120))
TOLERANCE = 0.03
ATTEMPTS = 4  # other programs disturb the run in real time, never the simulated one


def fast_profile(folder: Path) -> Path:
    fields = json.loads((PROFILES / "8b-h200.json").read_text())
    for term in TERMS:
        fields[term] /= FASTER
    fields["base_ns"] = [ns / FASTER for ns in fields["base_ns"]]
    fields["measured"] = False
    path = folder / "fast.json"
    path.write_text(json.dumps(fields))
    return path


def attempt(config: ServeConfig) -> Agreement:
    found = costs_of("persistent", num_steps=1000, length_ns=600_000)
    costs = Costs("here", "", "", "", PERCENT, {"persistent": found})
    requests = poisson_requests(RATE_PER_S, NUM_REQUESTS, 1, max_context=2048, table=SHORT)
    return compare(config, next(requests), costs.samples("persistent"))


def test_simulated_and_paced_runs_agree(tmp_path: Path) -> None:
    config = ServeConfig(
        model=ModelConfig(f"paced:{fast_profile(tmp_path)}"),
        ring=RingConfig(num_slots=256, token_ring_entries=65536),
        scheduler=SchedulerConfig(num_pages=8192, max_running=64, max_step_tokens=2048),
    )
    tried = []
    for _ in range(ATTEMPTS):
        agreement = attempt(config)
        assert agreement.simulated.num_requests == NUM_REQUESTS
        if all(abs(one) <= TOLERANCE for one in agreement.differences.values()):
            return
        tried.append((agreement.real.late_share, agreement.figures))
    raise AssertionError(f"late share, and figures real and simulated: {tried}")
