"""The simulation beside a paced run in real time: same requests, same configuration.

A run in real time is one draw: a step that is a little later lets another request in, and a p99 of
some hundred requests moves by ten percent. How far chance carries a figure the simulation says
itself, from its draws of the costs with other seeds.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from engine.config import ServeConfig
from engine.model.pace import Pace
from engine.simulate.costs import Samples
from engine.simulate.simulation import Result, Setup, simulate
from engine.workload import Requests
from loadtests.paced_run import PacedRun, play

RANKS = (50, 99)
SEEDS = range(1, 21)
TOLERANCE = 0.03
Named = dict[str, float]


@dataclass(frozen=True, slots=True)
class Agreement:
    """A run in real time, its figures by name, and those of the simulation with each seed."""

    real: PacedRun
    simulated: list[Result]
    measured: Named
    drawn: dict[str, list[float]]

    @property
    def differences(self) -> Named:
        """Simulated (median of the seeds) over real, less 1."""
        return {
            name: float(np.median(self.drawn[name])) / value - 1
            for name, value in self.measured.items()
        }

    @property
    def spreads(self) -> Named:
        """Half of the way from the least to the largest of the seeds, over the median."""
        return {
            name: (max(values) - min(values)) / 2 / float(np.median(values))
            for name, values in self.drawn.items()
        }

    @property
    def outside(self) -> list[str]:
        """Figures more than TOLERANCE outside of what the seeds gave."""
        return [
            name
            for name, value in self.measured.items()
            if not min(self.drawn[name]) * (1 - TOLERANCE)
            <= value
            <= max(self.drawn[name]) * (1 + TOLERANCE)
        ]


def compare(config: ServeConfig, requests: Requests, costs: Samples) -> Agreement:
    """Run both; the simulation gets the requests at the times at which they really were sent."""
    real = play(config, requests)
    pace = Pace.load(config.model.model.partition(":")[2])
    setup = Setup(config.path, config.ring, config.scheduler, pace, costs)
    simulated = [simulate(dataclasses.replace(setup, seed=seed), [real.requests]) for seed in SEEDS]
    measured = {"tokens_per_s": real.tokens_per_s}
    drawn = {"tokens_per_s": [one.tokens_per_s for one in simulated]}
    for times in ("ttft_ms", "tpot_ms"):
        for rank in RANKS:
            name = f"{times}_p{rank}"
            values = np.percentile(getattr(real, times), rank, method="inverted_cdf")
            measured[name] = float(values)
            drawn[name] = [getattr(one, times)[f"p{rank}"] for one in simulated]
    return Agreement(real, simulated, measured, drawn)
