"""cupysim: the part of CuPy that Blinkbed uses, over a simulated GPU in a process of its own.

``xp = importlib.import_module("emulation.cupysim")`` in place of ``import cupy as xp``. Names and
semantics are CuPy's; what is not provided raises AttributeError. The device process owns the
device memory and runs streams and graphs by itself: a chain of graphs that launch each other goes
on when the client is stopped or killed. Not CuPy's: `cuda.export`, `device_control`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from emulation.cupysim import cuda, elementwise, reduction
from emulation.cupysim.creation import (
    arange,
    array,
    asarray,
    ascontiguousarray,
    asnumpy,
    empty,
    empty_like,
    full,
    full_like,
    ones,
    ones_like,
    zeros,
    zeros_like,
)
from emulation.cupysim.cuda.memory import MemoryPool, default_pool
from emulation.cupysim.elementwise import where
from emulation.cupysim.manipulation import concatenate, copyto, take
from emulation.cupysim.module import RawKernel, RawModule
from emulation.cupysim.ndarray import ndarray

__all__ = [
    "RawKernel",
    "RawModule",
    "arange",
    "array",
    "asarray",
    "ascontiguousarray",
    "asnumpy",
    "concatenate",
    "copyto",
    "cuda",
    "empty",
    "empty_like",
    "full",
    "full_like",
    "get_array_module",
    "get_default_memory_pool",
    "ndarray",
    "ones",
    "ones_like",
    "take",
    "where",
    "zeros",
    "zeros_like",
]

_TYPES = [
    "bool_",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "dtype",
    "newaxis",
    "inf",
    "nan",
    "pi",
]

globals().update({name: getattr(np, name) for name in _TYPES})
globals().update(elementwise.FUNCTIONS)
globals().update({"abs": elementwise.FUNCTIONS["absolute"]})
globals().update(reduction.FUNCTIONS)


def __getattr__(name: str) -> Any:  # for the type checker: what globals() got above
    raise AttributeError(f"cupysim provides no cupy.{name}")


def get_default_memory_pool() -> MemoryPool:
    return default_pool


def get_array_module(*args: Any) -> Any:
    import sys

    return sys.modules[__name__] if any(isinstance(a, ndarray) for a in args) else np
