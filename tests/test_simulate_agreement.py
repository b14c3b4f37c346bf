"""The simulation against the paced device in real time, at the pace of an 8B model on an H200."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.config import PATHS, ModelConfig, RingConfig, SchedulerConfig, ServeConfig
from engine.simulate.costs import Costs
from engine.workload import poisson_requests
from loadtests.agreement import Agreement, compare
from loadtests.measure_costs import PERCENT, costs_of

PROFILE = "8b-h200"
RATE_PER_S, NUM_REQUESTS = 32.0, 300
MAX_CONTEXT = 6144


def run(path: str, seed: int) -> Agreement:
    """The path's costs, measured here and now, and a run beside its simulation."""
    costs = Costs("here", "", "", "", PERCENT, {path: costs_of(path, num_steps=500)})
    config = ServeConfig(
        model=ModelConfig(f"paced:{PROFILE}"),
        ring=RingConfig(num_slots=256, token_ring_entries=65536),
        scheduler=SchedulerConfig(
            num_pages=16384, max_running=64, max_step_tokens=2048, max_context=MAX_CONTEXT
        ),
        path=path,
    )
    requests = next(poisson_requests(RATE_PER_S, NUM_REQUESTS, seed, max_context=MAX_CONTEXT))
    return compare(config, requests, costs.samples(path))


@pytest.mark.parametrize("path", PATHS)
def test_simulated_and_paced_runs_agree(path: str) -> None:
    """Two runs of three: other programs disturb the run in real time, never the simulated one."""
    tried = []
    for seed in (1, 2, 3):
        found = run(path, seed)
        assert {one.num_requests for one in found.simulated} == {NUM_REQUESTS}
        tried.append(found)
        agreed = sum(not one.outside for one in tried)
        if agreed == 2 or len(tried) - agreed == 2:
            break
    assert agreed == 2, [(one.outside, one.measured, one.differences) for one in tried]


def test_a_figure_outside_of_the_draws_is_named() -> None:
    names = ("tokens_per_s", "ttft_ms_p50", "tpot_ms_p99")
    drawn = {name: [99.0, 100.0, 101.0] for name in names}
    measured = dict(zip(names, (95.9, 104.1, 103.9), strict=True))
    real = SimpleNamespace()
    found = Agreement(real, [], measured, drawn)  # type: ignore[arg-type]
    assert found.outside == ["tokens_per_s", "ttft_ms_p50"]
    assert found.differences["tokens_per_s"] == pytest.approx(100 / 95.9 - 1)
    assert found.spreads["tpot_ms_p99"] == pytest.approx(0.01)
