"""CUDA through CuPy and cuda-bindings: checked calls, memory for the scheduler, the window.

CuPy has no structured dtypes, so tables of structs are bytes on the device. `CudaLibrary` has
that part of CuPy's interface that `SchedulerMemory` needs.
"""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from cuda.bindings import runtime as cudart

from engine.device.cuda_call import CudaError, checked
from engine.device.nvcc import build_cubin

__all__ = [
    "CSRC",
    "CudaError",
    "CudaLibrary",
    "DeviceWindow",
    "HostWindow",
    "checked",
    "load_module",
]

CSRC = Path(__file__).parents[1] / "csrc"


@functools.cache
def architecture() -> str:
    """The compiler's name for the current device, such as sm_90."""
    return f"sm_{cupy.cuda.Device().compute_capability}"


def load_module(
    source: Path, include_dirs: Sequence[Path] = (CSRC,), *, device_launch: bool = False
) -> Any:
    """A cupy.RawModule of the CUDA C++ file."""
    path = build_cubin(
        source,
        include_dirs=include_dirs,
        architecture=architecture(),
        device_launch=device_launch,
    )
    return cupy.RawModule(path=str(path))


class CudaLibrary:
    """CuPy, with arrays of structs as bytes."""

    cuda = cupy.cuda

    @staticmethod
    def zeros(shape: int | tuple[int, ...], dtype: Any) -> Any:
        dtype = np.dtype(dtype)
        if dtype.fields is None:
            return cupy.zeros(shape, dtype)
        return cupy.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)

    @staticmethod
    def asarray(array: Any) -> Any:
        if isinstance(array, np.ndarray) and array.dtype.fields is not None:
            return cupy.asarray(np.ascontiguousarray(array).view(np.uint8))
        return cupy.asarray(array)

    @staticmethod
    def asnumpy(array: Any) -> np.ndarray:
        return array if isinstance(array, np.ndarray) else cupy.asnumpy(array)


class HostWindow:
    """The window in host memory that the GPU polls: a memory file, mapped here and registered.

    With `path` it is that file, at `offset` (a multiple of the page size): an RNIC's memory.
    Whoever stands for the NIC maps `fd`. With unified addressing the GPU uses the mapping's own
    addresses. A context manager; `close` is idempotent, and the GPU's loop must have ended.
    """

    home = "host memory, pinned and mapped into the GPU"
    handle = b""

    def __init__(self, nbytes: int, path: Path | None = None, offset: int = 0) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.offset = offset
        if path is None:
            self.fd = os.memfd_create("blinkbed-window")
            os.ftruncate(self.fd, offset + self.nbytes)
        else:
            self.fd = os.open(path, os.O_RDWR)
        self._map = mmap.mmap(self.fd, self.nbytes, offset=offset)
        self._map[:] = bytes(self.nbytes)
        whole = np.frombuffer(self._map, np.uint8)
        self._address = whole.ctypes.data
        self.array = whole[:nbytes]
        checked(
            "cudaHostRegister",
            self._address,
            self.nbytes,
            cudart.cudaHostRegisterMapped | cudart.cudaHostRegisterPortable,
        )
        self._is_open = True
        device_address = checked("cudaHostGetDevicePointer", self._address, 0)
        if int(device_address) != self._address:
            raise CudaError("this GPU does not reach registered memory at the host's addresses")

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            checked("cudaHostUnregister", self._address)
            os.close(self.fd)

    def __enter__(self) -> HostWindow:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class DeviceWindow:
    """The window in the GPU's own memory: another process on this machine opens `handle`.

    There is no file: `fd` is -1. `close` is idempotent, and the GPU's loop must have ended.
    """

    home = "GPU memory, staged: the SmartNIC's process copies"
    fd, offset = -1, 0

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._address = int(checked("cudaMalloc", nbytes))
        checked("cudaMemset", self._address, 0, nbytes)
        memory = cupy.cuda.UnownedMemory(self._address, nbytes, self)
        self.array = cupy.ndarray(nbytes, np.uint8, cupy.cuda.MemoryPointer(memory, 0))
        self.handle = bytes(checked("cudaIpcGetMemHandle", self._address).reserved)

    def close(self) -> None:
        if self._address:
            checked("cudaFree", self._address)
            self._address = 0
