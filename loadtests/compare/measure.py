"""Measures one cell on a running stack."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvloop

from emulation.counter_measures import measure_applied
from emulation.cpu_split import CLIENT_PRIORITY, CpuSplit
from emulation.interference import Interference
from engine.freeze import Freeze
from engine.ready import ReadyLine
from loadtests.compare import figures, observe
from loadtests.compare.cell import Cell
from loadtests.compare.client import Client, Timing
from loadtests.compare.load import PROMPT_TOKENS, requests_of

START_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 60.0
BEFORE_S, AFTER_S = 2.0, 2.0
INTERFERENCE_MARGIN_S = 120.0
LATE_SHARE = 0.05


@dataclass(slots=True)
class Window:
    """The time that is measured, and what the stack counted at both ends."""

    ready: ReadyLine
    meter: observe.EnergyMeter
    begin_s: float = 0.0
    end_s: float = 0.0
    marks: list[dict[str, Any]] = field(default_factory=list)

    async def mark(self) -> None:
        """Note the counters now; the first and the last count."""
        samples = await asyncio.to_thread(observe.scrape, self.ready.url)
        host = observe.cpu_seconds(self.ready.host_pid)
        launcher = observe.cpu_seconds(self.ready.launcher_pid)
        now = time.monotonic()
        self.marks.append(
            {"s": now, "samples": samples, "host": host + launcher, "joules": self.meter.joules()}
        )
        self.begin_s = self.begin_s or now
        self.end_s = now

    def figures(self, timings: Sequence[Timing]) -> dict[str, Any]:
        """All figures of the window."""
        first, last = self.marks[0], self.marks[-1]
        seen = figures.client_figures(timings, self.begin_s, self.end_s)
        device = figures.device_figures(
            first["samples"], last["samples"], self.end_s - self.begin_s
        )
        joules = None if first["joules"] is None else last["joules"] - first["joules"]
        host_s = figures.per_token(last["host"] - first["host"], device["device_tokens"])
        return {
            **seen,
            **device,
            "host_us_per_token": None if host_s is None else round(1e6 * host_s, 4),
            "joules_per_token": figures.per_token(joules, device["device_tokens"]),
            "energy_source": self.meter.reason,
            "pace": observe.pace_figures(first["samples"], last["samples"]),
        }


async def _load(cell: Cell, client: Client, window: Window, context: int) -> None:
    requests = requests_of(cell, context)
    await window.mark()
    deadline_s = window.begin_s + cell.seconds + DRAIN_TIMEOUT_S
    playing = asyncio.create_task(client.play(requests, deadline_s))
    await asyncio.sleep(cell.seconds)
    await window.mark()
    await playing


async def _steady(cell: Cell, client: Client, window: Window, context: int) -> None:
    streams = await _begin_streams(cell, client, context)
    await window.mark()
    await asyncio.sleep(cell.seconds)
    await window.mark()
    client.cut()
    await streams


async def _frozen(cell: Cell, client: Client, window: Window, context: int) -> dict[str, Any]:
    """As steady, and the host stands still in the middle; the longest gaps without and with."""
    streams = await _begin_streams(cell, client, context)
    await window.mark()
    await asyncio.sleep(BEFORE_S)
    before_s = time.monotonic()
    with Freeze([window.ready.launcher_pid, window.ready.host_pid]):
        await asyncio.sleep(cell.seconds)
    frozen_end_s = time.monotonic()
    await asyncio.sleep(AFTER_S)
    await window.mark()
    timings = list(client.timings)
    gaps = {
        "gap_before_ms": figures.longest_gap_ms(timings, window.begin_s, before_s),
        "gap_frozen_ms": figures.longest_gap_ms(timings, before_s, frozen_end_s + AFTER_S),
        "frozen_s": round(frozen_end_s - before_s, 3),
    }
    client.cut()
    await streams
    return gaps


async def _begin_streams(cell: Cell, client: Client, context: int) -> asyncio.Future[Any]:
    """`batch` streams, all past their first token."""
    num_output = context - PROMPT_TOKENS - 8
    tasks = [asyncio.create_task(client.send(PROMPT_TOKENS, num_output)) for _ in range(cell.batch)]
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not all(timing.times_s or timing.error for timing in client.timings):
        if time.monotonic() > deadline_s:
            break
        await asyncio.sleep(0.02)
    return asyncio.gather(*tasks)


async def _run(
    cell: Cell, ready: ReadyLine, meter: observe.EnergyMeter, context: int
) -> dict[str, Any]:
    client, window = Client(ready.url), Window(ready, meter)
    extra = None
    match cell.kind:
        case "load":
            await _load(cell, client, window, context)
        case "frozen":
            extra = await _frozen(cell, client, window, context)
        case _:
            await _steady(cell, client, window, context)
    return window.figures(client.timings) | (extra or {})


@contextlib.contextmanager
def _client_on(cpus: Collection[int]) -> Iterator[None]:
    """This process on the client's CPUs, undisturbed by the collector of garbage."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    with contextlib.suppress(OSError):  # whether priorities are allowed, `pace` tells
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(CLIENT_PRIORITY))
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        gc.enable()
        os.sched_setaffinity(0, before)


def measure_cell(
    cell: Cell, ready: ReadyLine, split: CpuSplit, *, maker: str, per_cpu: int, context: int
) -> dict[str, Any]:
    """``interference``, ``measure``, ``figures``, ``valid`` and ``reasons`` of one cell.

    A counter-measure that is not available here is not measured: its figures are None.
    """
    meter = observe.EnergyMeter(ready.device)
    pressure = Interference(
        split.host, cell.seconds + INTERFERENCE_MARGIN_S, maker=maker, per_cpu=per_cpu
    )
    with contextlib.ExitStack() as stack:
        tried = stack.enter_context(measure_applied(cell.measure, ready.host_pid, split))
        about = {
            "measure": {"name": tried.name, "available": tried.is_available, "how": tried.how},
            "interference": pressure.description if cell.has_interference else "none",
        }
        if not tried.is_available:
            return {**about, "figures": None, "valid": True, "reasons": []}
        observe.wait_idle(ready.url, DRAIN_TIMEOUT_S)
        if cell.has_interference:
            stack.enter_context(pressure)
        with _client_on(split.client):
            found = uvloop.run(_run(cell, ready, meter, context))
        if cell.has_interference and not pressure.is_running():
            raise RuntimeError("the interference ended before the measurement did")
    reasons = doubts(cell, found)
    return {**about, "figures": found, "valid": not reasons, "reasons": reasons}


def doubts(cell: Cell, found: dict[str, Any]) -> list[str]:
    """Why a cell's figures must not be believed; none for most."""
    reasons = []
    late, steps = observe.late_steps(found["pace"]), found["num_steps"]
    if steps and late > LATE_SHARE * steps:
        reasons.append(
            f"the paced device was late in {late:.0f} of {steps} steps: this machine did not keep "
            "the GPU's pace"
        )
    if found["num_failed"]:
        reasons.append(f"{found['num_failed']} requests failed: {found['first_error']}")
    if found["num_ended"] and cell.kind in ("steady", "frozen"):
        reasons.append(
            f"{found['num_ended']} streams ended within the window: give more --context, or fewer "
            "seconds"
        )
    if not found["num_tokens"]:
        reasons.append("no token came")
    return reasons
