"""The simulation beside a paced run in real time: same requests, same configuration.

Replayed: with what the path around each step of that very run took, in order. Then nothing is left
to chance but near ties: a request that came within some microseconds of a step's begin.

Drawn: with the same costs as distributions, as `blinkbed simulate` uses them. A run is one draw
then: a step that is a little later lets another request in, and a p99 of some hundred requests
moves by ten percent. How far chance carries a figure the simulation says itself, from its draws
with other seeds.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.config import ModelConfig, RingConfig, SchedulerConfig, ServeConfig
from engine.model.pace import PROFILES, TERMS, Pace
from engine.simulate.simulation import Result, Setup, simulate
from engine.timeline import Event
from engine.workload import Requests, poisson_requests
from loadtests.paced_run import PacedRun, play
from loadtests.recorded_costs import recorded_costs

PROFILE = "8b-h200"
RATE_PER_S = 32.0
MAX_CONTEXT = 6144
SEEDS = range(1, 21)
TIMES, RANKS = ("ttft_ms", "tpot_ms"), (50, 99)
Named = dict[str, float]


@dataclass(frozen=True, slots=True)
class Agreement:
    """A run in real time, and the simulations of it."""

    real: PacedRun
    replayed: Result
    drawn: list[Result]
    """With each of SEEDS."""

    @property
    def differences(self) -> Named:
        """Replayed over real, less 1, by figure."""
        return _over(_simulated(self.replayed), _measured(self.real))

    @property
    def drawn_differences(self) -> Named:
        """Median of the drawn ones over real, less 1."""
        return _over(self._medians(), _measured(self.real))

    @property
    def chance(self) -> Named:
        """Half of the way from the least to the largest of the drawn ones, over the median."""
        values = self._values()
        return {name: float(np.ptp(one) / 2 / np.median(one)) for name, one in values.items()}

    def _medians(self) -> Named:
        return {name: float(np.median(one)) for name, one in self._values().items()}

    def _values(self) -> dict[str, list[float]]:
        draws = [_simulated(one) for one in self.drawn]
        return {name: [one[name] for one in draws] for name in draws[0]}


def _measured(real: PacedRun) -> Named:
    figures = {"tokens_per_s": real.tokens_per_s}
    for times in TIMES:
        for rank in RANKS:
            values = np.percentile(getattr(real, times), rank, method="inverted_cdf")
            figures[f"{times}_p{rank}"] = float(values)
    return figures


def _simulated(one: Result) -> Named:
    figures = {"tokens_per_s": one.tokens_per_s}
    for times in TIMES:
        figures |= {f"{times}_p{rank}": getattr(one, times)[f"p{rank}"] for rank in RANKS}
    return figures


def _over(some: Named, others: Named) -> Named:
    return {name: value / others[name] - 1 for name, value in some.items()}


def run(path: str, num_requests: int, seed: int) -> Agreement:
    """An 8B model's load on `path`. Of at most engine.state.TIMELINE_STEPS steps, or ValueError."""
    (requests,) = poisson_requests(RATE_PER_S, num_requests, seed, max_context=MAX_CONTEXT)
    with context_free_profile() as profile, tempfile.TemporaryDirectory() as folder:
        timeline = Path(folder, "timeline.json")
        config = ServeConfig(
            model=ModelConfig(f"paced:{profile}"),
            ring=RingConfig(num_slots=256, token_ring_entries=65536),
            scheduler=SchedulerConfig(
                num_pages=16384, max_running=64, max_step_tokens=2048, max_context=MAX_CONTEXT
            ),
            path=path,
            timeline=str(timeline),
        )
        real = play(config, requests)
        events = [Event(**one) for one in json.loads(timeline.read_text())["events"]]
        pace = Pace.load(str(profile))
    costs = recorded_costs(path, events, pace)
    setup = Setup(path, config.ring, config.scheduler, pace, costs, costs_in_order=True)
    drawing = dataclasses.replace(setup, costs_in_order=False)
    woke_s = (min(one.start_ns for one in events) - real.began_ns) / 1e9
    return Agreement(
        real,
        simulate(setup, [_since_the_first_turn(real.requests, woke_s)]),
        [simulate(dataclasses.replace(drawing, seed=seed), [real.requests]) for seed in SEEDS],
    )


def _since_the_first_turn(requests: Requests, woke_s: float) -> Requests:
    """The simulation's first turn is at the first arrival; the engine took `woke_s` to see it."""
    return dataclasses.replace(requests, arrival_s=np.maximum(0, requests.arrival_s - woke_s))


@contextmanager
def context_free_profile() -> Iterator[Path]:
    """PROFILE without the terms of contexts: the length of each pass follows from the timeline."""
    fields: Mapping[str, object] = json.loads((PROFILES / f"{PROFILE}.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{PROFILE}-context-free.json")
        path.write_text(json.dumps({**fields, **dict.fromkeys(TERMS, 0.0)}))
        yield path
