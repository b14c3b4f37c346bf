"""cupy.cuda over the simulated device."""

from __future__ import annotations

from emulation.cupysim.cuda import compiler, export, memory, runtime
from emulation.cupysim.cuda.device import Device, get_device_id
from emulation.cupysim.cuda.graph import Graph
from emulation.cupysim.cuda.memory import (
    BaseMemory,
    MemoryPointer,
    MemoryPool,
    UnownedMemory,
    alloc,
)
from emulation.cupysim.cuda.stream import Event, Stream, get_current_stream, get_elapsed_time
from emulation.cupysim.module import Function

__all__ = [
    "BaseMemory",
    "Device",
    "Event",
    "Function",
    "Graph",
    "MemoryPointer",
    "MemoryPool",
    "Stream",
    "UnownedMemory",
    "alloc",
    "compiler",
    "export",
    "get_current_stream",
    "get_device_id",
    "get_elapsed_time",
    "is_available",
    "memory",
    "runtime",
]


def is_available() -> bool:
    return True
