"""The scheduler on the GPU: time per turn, the ring under torture, doorbell to pickup."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from engine import native
from engine.config import RingConfig, SchedulerConfig
from engine.device.cuda import CSRC, CudaLibrary, HostWindow, load_module
from engine.protocol import (
    C_CONSTANTS,
    COUNTERS,
    Geometry,
    control_offset,
    doorbell_word,
)
from engine.ring import Address, RequestParams, Ticket, encode_record
from engine.scheduler_memory import ModelLimits, SchedulerMemory, device_pointer
from engine.state import Command

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "loadtests" / "csrc"
PHASES = ("publish", "poll", "admit", "plan", "show")
EPOCH = 7


def make_memory(
    ring: RingConfig, scheduler: SchedulerConfig, limits: ModelLimits
) -> tuple[HostWindow, SchedulerMemory]:
    geometry = Geometry(
        ring.num_slots, ring.token_ring_entries, limits.max_context, limits.vocab_size
    )
    window = HostWindow(ring.num_ports * geometry.port_bytes)
    library: Any = CudaLibrary
    return window, SchedulerMemory(library, window.array, ring, scheduler, limits, EPOCH)


def post(memory: SchedulerMemory, count: int, params: RequestParams, num_prompt: int) -> None:
    """Write `count` records and their doorbells straight into port 0."""
    g, window = memory.geometry, memory.window
    window[control_offset("session") : control_offset("session") + 4].view(np.uint32)[0] = 1
    rng = np.random.default_rng(0)
    for i in range(count):
        prompt = rng.integers(0, memory.geometry.vocab_size - 3, num_prompt).tolist()
        raw = encode_record(params, prompt, Address(EPOCH, 1), i + 1, Ticket(i, 1))
        at = g.slot_offset(i)
        window[at : at + len(raw)] = np.frombuffer(raw, np.uint8)
        bell = g.doorbell_offset(i + 1)
        window[bell : bell + 8].view(np.uint64)[0] = doorbell_word(i + 1, 1, i)


def time_turns(
    running: int, waiting: int, team: int, home: str, num_prompt: int = 16
) -> dict[str, Any]:
    """Median ns of each phase of a turn in steady decode."""
    ring = RingConfig(num_slots=2048, num_ports=1, token_ring_entries=1 << 17)
    scheduler = SchedulerConfig(
        num_pages=running * 64, page_size=16, max_running=running, max_step_tokens=2048,
        max_context=1024,
    )  # fmt: skip
    limits = ModelLimits(300, 1024, (257,))
    window, memory = make_memory(ring, scheduler, limits)
    with window:
        params = RequestParams(max_tokens=600, ignore_eos=True)
        post(memory, running + waiting, params, num_prompt)
        if home == "device":
            moved = cupy.asarray(np.asarray(memory.window))
            memory.word("window").set(np.array([moved.data.ptr], np.uint64))
        turns, warm = 300, 60
        phases = cupy.zeros((turns, len(PHASES)), np.uint32)
        kernel = load_module(ROOT / "engine/device/turn.cu").get_function("timed_turns")
        kernel((1,), (team,), (np.uint64(device_pointer(memory.state)), np.int32(turns), phases))
        cupy.cuda.Device().synchronize()
        counts = {n: int(memory.word(n).get()[0]) for n in ("num_running", "num_waiting")}
        times = np.median(cupy.asnumpy(phases)[warm:], axis=0)
    return {
        "window": home, "team": team, **counts, "total_us": round(float(times.sum()) / 1e3, 2),
        **{f"{n}_us": round(float(t) / 1e3, 2) for n, t in zip(PHASES, times, strict=True)},
    }  # fmt: skip


def scheduler_part() -> dict[str, Any]:
    from tests.cuda_turn import run_trace

    started, compared, seed = time.monotonic(), 0, 0
    while time.monotonic() - started < 15:
        compared += run_trace(seed, 60)
        seed += 1
    print(f"{compared} turns of {seed} random traces equal on GPU and host", flush=True)
    table = []
    for home in ("host", "device"):
        for load in ((256, 1024, 256), (256, 1024, 512), (32, 0, 256), (1, 0, 256)):
            table.append(time_turns(*load, home))
            print(table[-1], flush=True)
    return {"compared_turns": compared, "traces": seed, "turns": table}


REPORT_FIELDS = ("posted", "ended", "errors", "misrouted", "round_trip_ns", "elapsed_ns")


class _Report(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in REPORT_FIELDS]


def producer_library() -> ctypes.CDLL:
    path = native.build_library(
        [BENCH / "producer.cpp", CSRC / "client.cpp"], include_dirs=[CSRC], name="producer"
    )
    return ctypes.CDLL(str(path))


def producer_main(fd: int, port: int, geometry: Geometry, overtake: int, count: int) -> None:
    """The producer's process: map the window, run, print the report."""
    import mmap

    memory = mmap.mmap(fd, os.fstat(fd).st_size)
    base = np.frombuffer(memory, np.uint8).ctypes.data + port * geometry.port_bytes
    layout = np.array(
        [geometry.cancels_offset, geometry.slots_offset, geometry.tokens_offset,
         geometry.token_ring_entries], np.uint64,
    )  # fmt: skip
    report = _Report()
    run = producer_library().bb_torture_port
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64,
                    ctypes.c_uint64, ctypes.c_void_p]  # fmt: skip
    run(base, layout.ctypes.data, overtake, count, 60 * 10**9, ctypes.addressof(report))
    print(json.dumps({n: getattr(report, n) for n in REPORT_FIELDS}), flush=True)


def start_producer(
    window: HostWindow, memory: SchedulerMemory, port: int, overtake: bool, count: int
) -> subprocess.Popen[str]:
    g = memory.geometry
    code = (
        "from loadtests.bench_h200_scheduler import *;"
        f"producer_main({window.fd},{port},Geometry({g.num_slots},{g.token_ring_entries},"
        f"{g.max_context},{g.vocab_size}),{int(overtake)},{count})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=[window.fd], stdout=subprocess.PIPE, text=True,
        cwd=ROOT,
    )  # fmt: skip


def torture(num_ports: int, count: int, overtake: bool, num_slots: int = 64) -> dict[str, Any]:
    """Producer processes against the device's loop: what came back, what was executed torn."""
    import torch

    from engine.device.step_graphs import StepGraphs

    ring = RingConfig(num_slots=num_slots, num_ports=num_ports, token_ring_entries=4096)
    scheduler = SchedulerConfig(num_pages=4096, page_size=16, max_running=256,
                                max_step_tokens=4096, max_context=256)  # fmt: skip
    limits = ModelLimits(50000, 256, ())
    window, memory = make_memory(ring, scheduler, limits)
    counts = cupy.zeros(2, np.uint64)
    kernel = load_module(BENCH / "torture.cu").get_function("torture_pass")

    def launch_pass(bucket: int) -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel((1,), (256,), (np.uint64(device_pointer(memory.state)), counts))

    with window:
        graphs = StepGraphs(memory, launch_pass, [scheduler.max_step_tokens])
        graphs.start()
        producers = [start_producer(window, memory, p, overtake, count) for p in range(num_ports)]
        reports = [json.loads(p.communicate(timeout=90)[0]) for p in producers]
        graphs.command(Command.STOP)
        graphs.stream.synchronize()
        at = C_CONSTANTS["kCountersOffset"]
        names = ("records_rejected", "records_torn", "num_steps", "gap_ns", "step_ns")
        totals = dict.fromkeys(names, 0)
        for port in range(num_ports):
            start = port * memory.geometry.port_bytes + at
            line = np.asarray(memory.window[start : start + COUNTERS.dtype.itemsize])
            counters = line.view(COUNTERS.dtype)[0]
            for name in totals:
                totals[name] += int(counters[name])
        executed, torn = (int(n) for n in counts.get())
        error = graphs.error()
    ended = sum(r["ended"] for r in reports)
    seconds = max(r["elapsed_ns"] for r in reports) / 1e9
    result = {
        "ports": num_ports, "overtaking": overtake, "slots": num_slots, "ended": ended,
        "executed": executed, "executed_torn": torn, "error": error,
        "errors": sum(r["errors"] for r in reports),
        "misrouted": sum(r["misrouted"] for r in reports),
        "records_per_s": round(ended / seconds),
        "round_trip_us": round(sum(r["round_trip_ns"] for r in reports) / max(ended, 1) / 1e3, 1),
        "looks_at_torn": totals["records_torn"], "rejected": totals["records_rejected"],
        "steps": totals["num_steps"] // num_ports,
        "turn_us": round(totals["gap_ns"] / max(totals["num_steps"], 1) / 1e3, 1),
        "step_us": round(totals["step_ns"] / max(totals["num_steps"], 1) / 1e3, 1),
    }  # fmt: skip
    print(result, flush=True)
    return result


def ring_part() -> dict[str, Any]:
    producer_library()
    return {
        "single_record": torture(1, 3000, overtake=False, num_slots=2),
        "torture": [
            torture(1, 300_000, overtake=True),
            torture(4, 300_000, overtake=True),
            torture(8, 100_000, overtake=False),
        ],
    }


def sanitizer_part() -> dict[str, Any]:
    """compute-sanitizer over random traces of the scheduler's turn."""
    results = {}
    for tool in ("memcheck", "racecheck"):
        command = ["compute-sanitizer", "--tool", tool, sys.executable, "-m", "tests.cuda_turn"]
        try:
            done = subprocess.run(
                [*command, "3", "25"], capture_output=True, text=True, timeout=100, cwd=ROOT,
                check=False,
            )  # fmt: skip
            lines = (done.stdout + done.stderr).strip().splitlines()
        except subprocess.TimeoutExpired as error:
            lines = [f"not done within {error.timeout} s"]
        results[tool] = lines[-6:]
        print(tool, *lines[-6:], sep="\n  ", flush=True)
    return results
