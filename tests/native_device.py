"""The scheduler and the scripted model as one native loop: a device for the SmartNIC's own tests.

``python -m tests.native_device --config FILE [--step-us N]``: lays out the window in shared memory,
answers handshakes, and runs the host-compiled scheduler in turns. It is the real scheduler behind
the real ring, only without a simulated GPU around it, so it starts in an instant and its pace is
a number.
"""

from __future__ import annotations

import argparse
import mmap
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from engine.config import ServeConfig
from engine.handshake import HandshakeServer, ModelCard, Offer
from engine.host_scheduler import scheduler_library
from engine.model.source import open_model
from engine.protocol import Geometry
from engine.scheduler_memory import ModelLimits, SchedulerMemory


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--step-us", type=int, default=0)
    arguments = parser.parse_args()
    config = ServeConfig.from_json(arguments.config.read_text())
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    source = open_model(config.model.model)
    limits = ModelLimits(source.spec.vocab_size, config.scheduler.max_context, source.spec.eos_ids)
    ring = config.ring
    geometry = Geometry(
        ring.num_slots, ring.token_ring_entries, limits.max_context, limits.vocab_size
    )
    window_fd = os.memfd_create("window")
    os.ftruncate(window_fd, geometry.port_bytes * ring.num_ports)
    window = np.frombuffer(mmap.mmap(window_fd, geometry.port_bytes * ring.num_ports), np.uint8)
    epoch = time.time_ns()
    memory = SchedulerMemory(np, window, ring, config.scheduler, limits, epoch)
    pool_tokens = config.scheduler.num_pages * config.scheduler.page_size
    card = ModelCard(
        model_id=source.spec.name,
        max_model_len=min(limits.max_context, pool_tokens),
        vocab_size=limits.vocab_size,
        eos_ids=limits.eos_ids,
        tokenizer=source.card,
    )
    offer = Offer(window_fd, 0, geometry, ring.num_ports, epoch, "native memory", card, {})
    library = scheduler_library()
    pointer = memory.state.ctypes.data
    pause_s = arguments.step_us / 1e6
    with HandshakeServer(config.handshake_socket, offer):
        while not stop.is_set():
            library.bb_scheduler_step(pointer)
            num_rows = int(memory.arrays["plan"][0]["num_rows"])
            library.bb_scripted_pass(pointer)
            if pause_s or not num_rows:
                time.sleep(pause_s or 5e-5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
