"""The scheduler compiled for the host: one turn at a time, over NumPy memory."""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from engine import native
from engine.config import RingConfig, SchedulerConfig
from engine.ring_library import CSRC
from engine.scheduler_memory import ModelLimits, SchedulerMemory


@functools.cache
def scheduler_library() -> ctypes.CDLL:
    """engine/csrc/scheduler_host.cpp, built at first use."""
    path = native.build_library(
        [CSRC / "scheduler_host.cpp"], include_dirs=[CSRC], name="scheduler"
    )
    library = ctypes.CDLL(str(path))
    library.bb_scheduler_step.argtypes = [ctypes.c_void_p]
    library.bb_scheduler_step.restype = None
    pointer, u64 = ctypes.c_void_p, ctypes.c_uint64
    library.bb_turn.argtypes = [
        *(pointer, ctypes.c_int, pointer, pointer, pointer, u64, u64, pointer, pointer)
    ]
    library.bb_turn.restype = None
    library.bb_pack.argtypes = [pointer, pointer, pointer, pointer]
    library.bb_pack.restype = u64
    library.bb_packet_bytes.argtypes = [pointer]
    library.bb_packet_bytes.restype = u64
    library.bb_apply_packet.argtypes = [pointer, pointer]
    library.bb_apply_packet.restype = None
    library.bb_anything_new.argtypes = [pointer]
    library.bb_anything_new.restype = ctypes.c_int
    library.bb_show.argtypes = [pointer]
    library.bb_show.restype = None
    library.bb_scripted_pass.argtypes = [ctypes.c_void_p]
    library.bb_scripted_pass.restype = None
    library.bb_philox_uniform.argtypes = [ctypes.c_uint64, ctypes.c_uint32]
    library.bb_philox_uniform.restype = ctypes.c_float
    return library


class HostScheduler:
    """A scheduler in this process's memory. `memory.window` is what links connect to."""

    def __init__(
        self, ring: RingConfig, scheduler: SchedulerConfig, model: ModelLimits, *, epoch: int = 1
    ) -> None:
        from engine.protocol import Geometry

        geometry = Geometry(
            ring.num_slots, ring.token_ring_entries, model.max_context, model.vocab_size
        )
        raw = np.zeros(ring.num_ports * geometry.port_bytes + 4096, np.uint8)
        start = -raw.ctypes.data % 4096
        window = raw[start : start + ring.num_ports * geometry.port_bytes]
        self.memory = SchedulerMemory(np, window, ring, scheduler, model, epoch)
        self._library = scheduler_library()
        self._pointer = self.memory.state.ctypes.data

    def step(self) -> None:
        """Publish the last pass's results, poll, admit, and plan the next pass."""
        self._library.bb_scheduler_step(self._pointer)

    def scripted_pass(self) -> None:
        """Run the scripted model over the planned rows."""
        self._library.bb_scripted_pass(self._pointer)

    def port(self, index: int = 0) -> np.ndarray:
        """The bytes of one port."""
        size = self.memory.geometry.port_bytes
        window: np.ndarray = self.memory.window
        return window[index * size : (index + 1) * size]
