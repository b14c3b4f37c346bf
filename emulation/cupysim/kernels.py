"""Kernels in the device process: functions of built libraries, and methods of Python programs."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


class _Entry(ctypes.Structure):  # KernelEntry in csrc/cuda_shim.h
    _fields_ = (
        ("run", ctypes.c_void_p),
        ("num_params", ctypes.c_uint),
        ("sizes", ctypes.POINTER(ctypes.c_uint)),
        ("kinds", ctypes.c_char_p),
    )


@dataclass(frozen=True, slots=True)
class Signature:
    """What a client checks its arguments by. `kinds`: p pointer, i integer, f floating point,
    s structure, one letter per parameter; `sizes` in bytes."""

    kinds: str
    sizes: tuple[int, ...]
    barriers: bool  # the module uses __syncthreads


@dataclass(frozen=True, slots=True)
class NativeKernel:
    name: str
    run: int
    signature: Signature


@dataclass(frozen=True, slots=True)
class PythonKernel:
    name: str
    call: Callable[..., object]


class NativeModule:
    """A library that cupysim's compiler built. Stays loaded as long as the device process."""

    def __init__(self, path: str, runtime: int) -> None:
        self._library = ctypes.CDLL(path)
        self._library.cupysim_bind(ctypes.c_void_p(runtime))
        self._barriers = hasattr(self._library, "cupysim_syncthreads")

    def function(self, name: str) -> NativeKernel:
        """Raises LookupError where the module has no such kernel."""
        try:
            getter = getattr(self._library, f"cupysim_entry_{name}")
        except AttributeError:
            raise LookupError(
                f"the module has no kernel named {name}; a kernel is written "
                f'extern "C" __global__ void {name}(...)'
            ) from None
        getter.restype = ctypes.POINTER(_Entry)
        entry = getter().contents
        sizes = tuple(entry.sizes[i] for i in range(entry.num_params))
        return NativeKernel(name, entry.run, Signature(entry.kinds.decode(), sizes, self._barriers))


class PythonModule:
    """One instance of a class `package.module:Class`, made with the module's options."""

    def __init__(self, path: str, options: Sequence[str]) -> None:
        module_name, _, class_name = path.partition(":")
        if not class_name:
            raise ValueError(
                f"path={path!r}: a module of backend 'python' is named 'package.module:Class'"
            )
        made: Any = getattr(importlib.import_module(module_name), class_name)
        self._instance = made(*options)
        self._path = path

    def function(self, name: str) -> PythonKernel:
        call = getattr(self._instance, name, None)
        if not callable(call):
            raise LookupError(f"{self._path} has no method named {name}")
        return PythonKernel(f"{self._path}.{name}", call)
