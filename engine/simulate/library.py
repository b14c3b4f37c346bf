"""The native simulation (csrc/simulate.cpp), built at first use."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from engine import native
from engine.ring_library import CSRC

SIMULATE_CSRC = Path(__file__).parent / "csrc"
NUMBERS = (
    "num_requests", "num_failed", "num_delayed", "num_tokens", "num_steps", "num_preemptions",
    "num_rows", "first_arrival_ns", "last_token_ns", "busy_ns", "gap_ns", "idle_ns",
)  # fmt: skip


class Figures(ctypes.Structure):
    """csrc/simulate.cpp: Figures. Times in ns of the virtual clock."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in NUMBERS)


@functools.cache
def simulate_library() -> ctypes.CDLL:
    """The library with its signatures set; calls run without the interpreter's lock."""
    path = native.build_library(
        [SIMULATE_CSRC / "simulate.cpp"], include_dirs=[CSRC, SIMULATE_CSRC], name="simulate"
    )
    library = ctypes.CDLL(str(path))
    pointer, u64, integer = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
    library.bb_simulate_open.argtypes = [
        pointer, pointer, pointer, u64, integer, integer, u64, u64, integer,
    ]  # fmt: skip
    library.bb_simulate_open.restype = pointer
    library.bb_simulate_close.argtypes = [pointer]
    library.bb_simulate_close.restype = None
    library.bb_simulate_feed.argtypes = [pointer, pointer, pointer, pointer, u64, integer]
    library.bb_simulate_feed.restype = integer
    library.bb_simulate_figures.argtypes = [pointer, ctypes.POINTER(Figures)]
    library.bb_simulate_figures.restype = None
    library.bb_simulate_times.argtypes = [pointer, integer, pointer, integer, pointer]
    library.bb_simulate_times.restype = None
    return library
