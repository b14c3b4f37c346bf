"""One simulated run: an engine's configuration, a profile, a path's costs, and requests."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from engine.config import RingConfig, SchedulerConfig
from engine.errors import UserError
from engine.model.pace import Pace
from engine.model.scripted import EOS_ID, FIRST_STRING_ID
from engine.protocol import Geometry
from engine.scheduler_memory import ModelLimits, SchedulerMemory
from engine.simulate.costs import Samples
from engine.simulate.library import Figures, simulate_library
from engine.workload import Requests

DEPTHS = {"persistent": 0, "sync": 1, "async": 2}
"""Passes that the host keeps under way, by path; 0: the device drives itself."""
RANKS = (50, 90, 99)
TIMES = ("ttft_ms", "tpot_ms", "itl_ms")
FIRST_NS = 1_000_000_000  # virtual time of the load's begin: 0 means "never" to the scheduler
WANTS_MORE, IS_THROUGH = 0, 1


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated. costs: `Costs.samples` of the path. costs_in_order: column i is what step
    i takes, nothing is drawn; the last one stands for all further. link_us: each way. ends_by_eos:
    the scheduler does not know beforehand how long an answer gets.
    """

    path: str
    ring: RingConfig
    scheduler: SchedulerConfig
    pace: Pace
    costs: Samples
    seed: int = 1
    link_us: float = 0.0
    ends_by_eos: bool = False
    costs_in_order: bool = False

    def __post_init__(self) -> None:
        if self.path not in DEPTHS:
            raise UserError(f"no path {self.path!r} among {', '.join(DEPTHS)}")
        if self.ring.num_ports != 1:
            raise UserError("the simulation has one SmartNIC: num_ports must be 1 (--num-ports)")
        if self.scheduler.max_step_tokens > self.pace.buckets[-1]:
            raise UserError(
                f"the profile {self.pace.name} knows steps of up to {self.pace.buckets[-1]} "
                f"tokens; lower --max-step-tokens={self.scheduler.max_step_tokens}"
            )


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of a run, of virtual time. Spreads have count, mean, max, p50, p90, p99 in ms."""

    path: str
    num_requests: int
    num_delayed: int
    """Requests that found no free slot when they came, and waited before the ring."""
    num_tokens: int
    num_steps: int
    num_preemptions: int
    mean_rows: float
    seconds: float
    """From the first arrival to the last token."""
    tokens_per_s: float
    requests_per_s: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]
    busy_share: float
    """Of all time: the device is inside a pass."""
    gap_share: float
    """Of the time with work: the device waits between two passes."""

    def to_mapping(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


class Simulation:
    """A context manager: `run` once. Memory does not grow with the number of requests."""

    def __init__(self, setup: Setup) -> None:
        self._path = setup.path
        limits = ModelLimits(FIRST_STRING_ID, setup.scheduler.max_context, (EOS_ID,))
        geometry = Geometry(
            setup.ring.num_slots,
            setup.ring.token_ring_entries,
            limits.max_context,
            limits.vocab_size,
        )
        window = np.zeros(geometry.port_bytes, np.uint8)
        self._memory = SchedulerMemory(np, window, setup.ring, setup.scheduler, limits, epoch=1)
        pace, costs = setup.pace.to_struct(), np.ascontiguousarray(setup.costs)
        self._library = simulate_library()
        self._handle = self._library.bb_simulate_open(
            self._memory.state.ctypes.data,
            pace.ctypes.data,
            costs.ctypes.data,
            costs.shape[1],
            setup.costs_in_order,
            DEPTHS[setup.path],
            setup.seed,
            round(setup.link_us * 1e3),
            setup.ends_by_eos,
        )

    def run(self, requests: Iterable[Requests]) -> Result:
        """Through all requests; raises UserError when one of them cannot be served."""
        for chunk in requests:
            self._feed(chunk, is_last=False)
        none = np.zeros(0, np.int32)
        status = self._feed(Requests(np.zeros(0), none, none), is_last=True)
        assert status == IS_THROUGH
        return self._result()

    def _feed(self, chunk: Requests, *, is_last: bool) -> int:
        columns = (
            (chunk.arrival_s * 1e9).astype(np.uint64) + np.uint64(FIRST_NS),
            np.ascontiguousarray(chunk.prompt_tokens, np.int32),
            np.ascontiguousarray(chunk.output_tokens, np.int32),
        )
        status = int(
            self._library.bb_simulate_feed(
                self._handle, *(one.ctypes.data for one in columns), len(chunk), is_last
            )
        )
        if status < WANTS_MORE:
            raise UserError("a request waits that can never be served; give more --num-pages")
        return status

    def _result(self) -> Result:
        f = Figures()
        self._library.bb_simulate_figures(self._handle, ctypes.byref(f))
        if f.num_failed:
            raise UserError(
                f"{f.num_failed} of {f.num_requests} requests were refused by the device: prompt "
                "and output must fit --max-context and --num-pages"
            )
        seconds = max(f.last_token_ns - f.first_arrival_ns, 1) / 1e9
        with_work_ns = f.busy_ns + f.gap_ns
        return Result(
            path=self._path,
            num_requests=f.num_requests,
            num_delayed=f.num_delayed,
            num_tokens=f.num_tokens,
            num_steps=f.num_steps,
            num_preemptions=f.num_preemptions,
            mean_rows=round(f.num_rows / max(f.num_steps, 1), 3),
            seconds=round(seconds, 6),
            tokens_per_s=round(f.num_tokens / seconds, 2),
            requests_per_s=round(f.num_requests / seconds, 3),
            **{name: self._spread(index) for index, name in enumerate(TIMES)},
            busy_share=round(f.busy_ns / max(with_work_ns + f.idle_ns, 1), 6),
            gap_share=round(f.gap_ns / max(with_work_ns, 1), 6),
        )

    def _spread(self, which: int) -> dict[str, float]:
        shares = np.array(RANKS, np.float64) / 100
        values = np.zeros(3 + len(RANKS))
        self._library.bb_simulate_times(
            self._handle, which, shares.ctypes.data, len(RANKS), values.ctypes.data
        )
        names = ("mean", "max", *(f"p{rank}" for rank in RANKS))
        spread = {
            name: round(float(one) / 1e6, 4) for name, one in zip(names, values[1:], strict=True)
        }
        return {"count": int(values[0]), **spread}

    def close(self) -> None:
        """Give the native part's memory back; idempotent."""
        if self._handle is not None:
            self._library.bb_simulate_close(self._handle)
            self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def simulate(setup: Setup, requests: Iterable[Requests]) -> Result:
    """One run, from the begin to the last token."""
    with Simulation(setup) as simulation:
        return simulation.run(requests)
