"""The simulation beside a paced run in real time: same requests, same configuration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.config import ServeConfig
from engine.model.pace import Pace
from engine.simulate.costs import Samples
from engine.simulate.simulation import Result, Setup, simulate
from engine.workload import Requests
from loadtests.paced_run import PacedRun, play

RANKS = (50, 99)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Both runs, and the figures of both by name."""

    real: PacedRun
    simulated: Result
    figures: dict[str, tuple[float, float]]

    @property
    def differences(self) -> dict[str, float]:
        """Simulated over real, less 1."""
        return {name: after / before - 1 for name, (before, after) in self.figures.items()}


def compare(config: ServeConfig, requests: Requests, costs: Samples) -> Agreement:
    """Run both; the simulation gets the requests at the times at which they really were sent."""
    real = play(config, requests)
    pace = Pace.load(config.model.model.partition(":")[2])
    setup = Setup(config.path, config.ring, config.scheduler, pace, costs)
    simulated = simulate(setup, [real.requests])
    figures = {"tokens_per_s": (real.tokens_per_s, simulated.tokens_per_s)}
    for name in ("ttft_ms", "tpot_ms"):
        for rank in RANKS:
            measured = np.percentile(getattr(real, name), rank, method="inverted_cdf")
            figures[f"{name}_p{rank}"] = float(measured), getattr(simulated, name)[f"p{rank}"]
    return Agreement(real, simulated, figures)
