"""The engine's host process for measuring: loads a random model, starts the device's loop, waits.

    python -m loadtests.bench_h200_engine MODEL MAX_RUNNING

Prints one JSON line when the device drives itself; a line on stdin ends it. In between it may be
stopped.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from engine.config import RingConfig, SchedulerConfig
from engine.device.cuda import CudaLibrary, HostWindow
from engine.device.step_graphs import StepGraphs, token_buckets
from engine.model.cuda_pass import CudaPass
from engine.model.cuda_random import random_spec
from engine.model.cuda_weights import random_device_weights
from engine.protocol import EngineState, Geometry
from engine.scheduler_memory import ModelLimits, SchedulerMemory
from engine.state import Command


def main(model: str, max_running: int) -> int:
    started = time.monotonic()
    spec = random_spec(model)
    scheduler = SchedulerConfig(
        num_pages=24576, page_size=16, max_running=max_running, max_step_tokens=2048,
        max_context=8448,
    )  # fmt: skip
    ring = RingConfig(num_slots=1024, num_ports=1, token_ring_entries=1 << 16)
    limits = ModelLimits(spec.vocab_size, scheduler.max_context, spec.eos_ids)
    geometry = Geometry(ring.num_slots, ring.token_ring_entries, limits.max_context,
                        limits.vocab_size)  # fmt: skip
    window = HostWindow(geometry.port_bytes)
    library: Any = CudaLibrary
    memory = SchedulerMemory(library, window.array, ring, scheduler, limits, time.time_ns())
    weights = random_device_weights(spec, torch.device("cuda"), torch.bfloat16)
    pass_ = CudaPass(
        spec, weights, memory, num_pages=scheduler.num_pages, page_size=scheduler.page_size,
        max_tokens=scheduler.max_step_tokens,
    )  # fmt: skip
    graphs = StepGraphs(memory, pass_.launch, token_buckets(scheduler.max_step_tokens))
    graphs.start()
    facts = {"fd": window.fd, "nbytes": window.nbytes, "num_slots": ring.num_slots,
             "token_ring_entries": ring.token_ring_entries, "max_context": limits.max_context,
             "vocab_size": limits.vocab_size, "model": model, "max_running": max_running,
             "num_pages": scheduler.num_pages, "max_step_tokens": scheduler.max_step_tokens,
             "window": window.home, "start_s": round(time.monotonic() - started, 1)}  # fmt: skip
    print(json.dumps(facts), flush=True)
    sys.stdin.readline()
    graphs.command(Command.STOP)
    graphs.stream.synchronize()
    state, error = graphs.state(), graphs.error()
    window.close()
    print(json.dumps({"state": EngineState(state).name, "error": error}), flush=True)
    return error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
