"""The scheduler and the scripted model over a window that lies in a file: the GPU's side for tests
of links that reach the window from another machine.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Self

import numpy as np

from engine import protocol
from engine.config import RingConfig, SchedulerConfig
from engine.host_scheduler import scheduler_library
from engine.link.verbs_offer import withdraw_offer, write_offer
from engine.protocol import Geometry
from engine.scheduler_memory import ModelLimits, SchedulerMemory

SCRIPTED_EOS = 257
VOCAB_SIZE = 512


class WindowEngine:
    """A context manager: lays the window out, offers it, and schedules in a thread."""

    def __init__(
        self,
        path: Path,
        offset: int,
        num_bytes: int,
        ring: RingConfig,
        *,
        max_context: int = 256,
        idle_s: float = 1e-4,
    ) -> None:
        self._idle_s = idle_s
        fd = os.open(path, os.O_RDWR)
        try:
            self._mapping = mmap.mmap(fd, num_bytes, offset=offset)
        finally:
            os.close(fd)
        self._view = memoryview(self._mapping)
        self.memory = np.frombuffer(self._mapping, np.uint8)
        self.ring = ring
        self._limits = ModelLimits(VOCAB_SIZE, max_context, (SCRIPTED_EOS,))
        self._scheduler = SchedulerConfig(
            max_context=max_context, num_pages=2048, max_running=32, debug=True
        )
        self.geometry = Geometry(ring.num_slots, ring.token_ring_entries, max_context, VOCAB_SIZE)
        self.epoch = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """A new start of the engine: a fresh window, a new epoch, a new offer."""
        self.stop()
        withdraw_offer(self._view)
        size = self.ring.num_ports * self.geometry.port_bytes
        window = self.memory[:size]
        window[:] = 0
        self.epoch = time.time_ns()
        self.state = SchedulerMemory(
            np, window, self.ring, self._scheduler, self._limits, self.epoch
        )
        offer = {
            "version": protocol.VERSION,
            "layout_hash": protocol.layout_hash(),
            "geometry": dataclasses.asdict(self.geometry),
            "port_bytes": self.geometry.port_bytes,
            "num_ports": self.ring.num_ports,
            "epoch": self.epoch,
            "window": "nvdimm",
        }
        write_offer(self._view, offer)
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        library, pointer = scheduler_library(), self.state.state.ctypes.data
        while not self._stop.is_set():
            library.bb_scheduler_step(pointer)
            num_rows = int(self.state.arrays["plan"][0]["num_rows"])
            library.bb_scripted_pass(pointer)
            time.sleep(0 if num_rows else self._idle_s)

    def stop(self) -> None:
        """Stop scheduling; the window stays as it is."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10)
            self._thread = None

    def counter(self, name: str) -> int:
        """One of the port 0's counters (protocol.COUNTERS)."""
        start = protocol.C_CONSTANTS["kCountersOffset"]
        raw = bytes(self.memory[start : start + protocol.COUNTERS.dtype.itemsize])
        return int(np.frombuffer(raw, protocol.COUNTERS.dtype)[0][name])

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
