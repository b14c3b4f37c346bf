"""What the persistent path does on the GPU, as its SmartNIC sees it: idle, under interference, and
with the host's process stopped.

This process stands for the SmartNIC and keeps `NIC_CORES` for itself, as a DPU has cores of its
own; the engine's host process and the interference share all others.
"""

from __future__ import annotations

import atexit
import functools
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine.link.shm import SharedMemoryLink
from engine.protocol import FinishReason, Geometry
from engine.ring import RequestParams, RingClient, Ticket

ROOT = Path(__file__).parents[1]
NIC_CORES = {0, 1}
BURNERS_PER_CORE = 4
BURNER = "b=bytearray(1<<26)\nwhile 1:\n  b[:]=b[::-1]"


def host_cores() -> set[int]:
    return set(range(os.cpu_count() or 1)) - NIC_CORES


class Engine:
    """The engine's process, and the client of its window."""

    def __init__(self, model: str = "random:8b", max_running: int = 256) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "loadtests.bench_h200_engine", model, str(max_running)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        os.sched_setaffinity(self.process.pid, host_cores())
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine ended while starting: {self.process.wait()}")
        self.facts: dict[str, Any] = json.loads(line)
        print(self.facts, flush=True)
        self.geometry = Geometry(*(
            self.facts[n] for n in ("num_slots", "token_ring_entries", "max_context", "vocab_size")
        ))  # fmt: skip
        fd = os.open(f"/proc/{self.process.pid}/fd/{self.facts['fd']}", os.O_RDWR)
        self._map = mmap.mmap(fd, self.facts["nbytes"])
        os.close(fd)
        port = np.frombuffer(self._map, np.uint8)[: self.geometry.port_bytes]
        self.client = RingClient(SharedMemoryLink(port, self.geometry, "bench"))
        os.sched_setaffinity(0, NIC_CORES)

    def close(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.send_signal(signal.SIGCONT)
            self.process.stdin.write("end\n")
            self.process.stdin.flush()
            try:
                print("engine:", self.process.communicate(timeout=20)[0].strip(), flush=True)
            except subprocess.TimeoutExpired:
                self.process.kill()


@functools.cache
def engine() -> Engine:
    started = Engine()
    atexit.register(started.close)
    return started


@contextmanager
def interference(cores: set[int] | None = None) -> Iterator[int]:
    """Memory-burning processes on the cores given, or on all of the host's."""
    cores = cores or host_cores()
    code = f"import os\nos.sched_setaffinity(0, {cores})\n{BURNER}"
    burners = [
        subprocess.Popen([sys.executable, "-c", code]) for _ in range(BURNERS_PER_CORE * len(cores))
    ]
    time.sleep(3)
    try:
        yield len(burners)
    finally:
        for burner in burners:
            burner.kill()
        for burner in burners:
            burner.wait()


class Energy:
    """The GPU's own energy counter (NVML), mJ."""

    def __init__(self) -> None:
        import pynvml  # type: ignore[import-not-found]

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.read_mj = functools.partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)


@dataclass(slots=True)
class Asked:
    """One request: when it was due and each of its tokens came, s."""

    ticket: Ticket
    due: float
    times: list[float] = field(default_factory=list)
    reason: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests: all at once, or `rate` a second at random times."""

    count: int
    num_prompt: int
    num_tokens: int
    rate: float = 0.0
    stop_host: tuple[float, float] | None = None  # SIGSTOP and SIGCONT, s after the start
    limit_s: float = 150.0

    def arrivals(self) -> np.ndarray:
        if not self.rate:
            return np.zeros(self.count)
        return np.cumsum(np.random.default_rng(1).exponential(1 / self.rate, self.count))


def run(load: Load) -> dict[str, Any]:
    """Put the load through the ring; times as the client sees them, and the device's counters."""
    e, energy = engine(), Energy()
    rng = np.random.default_rng(2)
    prompts = rng.integers(0, e.geometry.vocab_size, (load.count, load.num_prompt)).tolist()
    params = RequestParams(max_tokens=load.num_tokens, ignore_eos=True)
    live: dict[int, Asked] = {}
    done: list[Asked] = []
    before, energy_before = settled(e.client), energy.read_mj()
    start = time.monotonic()
    due = (start + load.arrivals()).tolist()
    signals = list(zip(load.stop_host or (), (signal.SIGSTOP, signal.SIGCONT), strict=False))
    asked = 0
    while len(done) < load.count and time.monotonic() < start + load.limit_s:
        now = time.monotonic()
        if signals and now - start > signals[0][0]:
            e.process.send_signal(signals.pop(0)[1])
        while asked < load.count and due[asked] <= now and e.client.num_free_slots:
            ticket = e.client.submit(params, prompts[asked])
            live[ticket.slot] = Asked(ticket, due[asked])
            asked += 1
        entries = e.client.read_tokens(0.0005)
        now = time.monotonic()
        for entry in entries:
            request = live[int(entry["slot"])]
            if entry["token"] >= 0:
                request.times.append(now)
            if entry["finish_reason"]:
                request.reason = int(entry["finish_reason"])
                done.append(live.pop(request.ticket.slot))
                e.client.release(request.ticket)
    elapsed, energy_after = time.monotonic() - start, energy.read_mj()
    for _, number in signals:
        e.process.send_signal(number)
    e.process.send_signal(signal.SIGCONT)
    result = summary(load, done, elapsed, before, settled(e.client))
    tokens = sum(len(r.times) for r in done)
    result["joules_per_token"] = round((energy_after - energy_before) / 1e3 / max(tokens, 1), 4)
    return result


def settled(client: RingClient) -> Any:
    """The counters once the device is idle."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        snapshot = client.snapshot()
        if not snapshot.num_running and not snapshot.num_waiting:
            return snapshot
        time.sleep(0.01)
    return client.snapshot()


def percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3),
            "max": round(max(values), 3)}  # fmt: skip


def summary(
    load: Load, done: list[Asked], elapsed: float, before: Any, after: Any
) -> dict[str, Any]:
    tokens = sum(len(r.times) for r in done)
    steps = after.num_steps - before.num_steps
    step_ns, gap_ns = after.step_ns - before.step_ns, after.gap_ns - before.gap_ns
    first = max((r.times[0] for r in done), default=0.0)
    last = min((r.times[-1] for r in done), default=0.0)
    steady = [t for r in done[:1] for t in r.times if first <= t <= last]
    gaps = np.diff(steady) if len(steady) > 2 else np.zeros(1)
    return {
        "finished": len(done), "of": load.count, "elapsed_s": round(elapsed, 3),
        "wrong_ends": sum(r.reason != FinishReason.LENGTH for r in done),
        "tokens_per_s": round(tokens / elapsed),
        "ms_per_step_wall": round(elapsed * 1e3 / load.num_tokens, 3) if not load.rate else None,
        "ms_between_tokens_steady": round(float(gaps.mean()) * 1e3, 3),
        "token_gap_ms": percentiles((np.asarray(gaps) * 1e3).tolist()),
        "device_steps": steps, "device_step_ms": round(step_ns / max(steps, 1) / 1e6, 4),
        "device_gap_us": round(gap_ns / max(steps, 1) / 1e3, 2),
        "idle_share_percent": round(100 * gap_ns / max(step_ns + gap_ns, 1), 3),
        "ttft_ms": percentiles([(r.times[0] - r.due) * 1e3 for r in done]),
        "tpot_ms": percentiles(
            [(r.times[-1] - r.times[0]) * 1e3 / (len(r.times) - 1)
             for r in done if len(r.times) > 1]
        ),
        "preemptions": after.num_preemptions - before.num_preemptions,
    }  # fmt: skip


def show(name: str, result: dict[str, Any]) -> dict[str, Any]:
    print(name, json.dumps(result), flush=True)
    return result


def idle_and_loaded(loads: dict[str, Load]) -> dict[str, Any]:
    results: dict[str, Any] = {"engine": engine().facts, "nic_cores": sorted(NIC_CORES)}
    run(Load(8, 20, 8))  # first use of everything
    for name, load in loads.items():
        results[name] = show(name, run(load))
    with interference() as burners:
        results["burners"] = burners
        for name, load in loads.items():
            if load.stop_host is None:
                results[name + ", interference"] = show(name + ", interference", run(load))
    return results


def decode_part() -> dict[str, Any]:
    return idle_and_loaded({
        "32 x 512": Load(32, 100, 512),
        "32 x 512 again": Load(32, 100, 512),
        "32 x 3072, host stopped from 1 s to 11 s": Load(32, 100, 3072, stop_host=(1.0, 11.0)),
    })  # fmt: skip


def batch_part() -> dict[str, Any]:
    return idle_and_loaded({"256 x 256": Load(256, 100, 256)})


def poisson_part() -> dict[str, Any]:
    return idle_and_loaded({
        "8 req/s": Load(120, 512, 128, rate=8.0), "24 req/s": Load(360, 512, 128, rate=24.0),
    })  # fmt: skip


def long_part() -> dict[str, Any]:
    e = engine()
    run(Load(8, 20, 8))
    return {"engine": e.facts, "32 x 8000": show("32 x 8000", run(Load(32, 100, 8000)))}


def prefill_part() -> dict[str, Any]:
    """One prompt at a time; the device's own times from admission to the first token."""
    e = engine()
    rng = np.random.default_rng(4)
    table = {}
    for num_prompt in (128, 512, 1024, 2048):
        times = []
        for _ in range(8):
            ticket = e.client.submit(
                RequestParams(max_tokens=1, ignore_eos=True),
                rng.integers(0, e.geometry.vocab_size, num_prompt).tolist(),
            )
            deadline = time.monotonic() + 5
            while not len(e.client.read_tokens(0.01)) and time.monotonic() < deadline:
                pass
            e.client.release(ticket)
            slot = e.client.slot_times(ticket.slot)
            times.append((slot.first_token_ns - slot.admitted_ns) / 1e6)
        ms = float(np.median(times))
        flops = 2 * num_prompt * 6.98e9 + 2 * 128256 * 4096
        table[str(num_prompt)] = {"ms": round(ms, 3), "tflops": round(flops / ms / 1e9, 1)}
        print(num_prompt, table[str(num_prompt)], flush=True)
    return {"engine": e.facts, "prefill": table}
