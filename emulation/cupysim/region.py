"""Device memory as a process sees it: shared mappings, addressed by the device's own pointers.

The device process and its clients map the same files at different addresses. A device pointer is
an address in the device process; a Region turns it into a NumPy view of the local mapping, with
bounds checked by NumPy.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ArrayAddress:
    """Where an array lies in device memory; all that the device process needs to see it."""

    ptr: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Region:
    """One shared mapping. `base` is its address in the device process."""

    def __init__(self, fd: int, nbytes: int, *, base: int | None = None, offset: int = 0) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.offset = offset  # of the first byte in the file
        self.mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, offset=offset)
        self._bytes = np.frombuffer(self.mapping, dtype=np.uint8)
        self.local = int(self._bytes.ctypes.data)
        self.base = self.local if base is None else base

    def holds(self, ptr: int) -> bool:
        return self.base <= ptr < self.base + self.nbytes

    def view(self, address: ArrayAddress) -> Array:
        """Raises ValueError or TypeError for an array that leaves the region."""
        return np.ndarray(
            address.shape,
            address.dtype,
            buffer=self.mapping,
            offset=address.ptr - self.base,
            strides=address.strides,
        )

    def pointer(self, view: Array) -> int:
        """Device pointer of the first element of a view made by `view`."""
        return int(view.ctypes.data) - self.local + self.base


class RegionTable:
    """All regions of one device, in either process."""

    def __init__(self) -> None:
        self._regions: list[Region] = []

    def add(self, region: Region) -> None:
        self._regions.append(region)

    def remove(self, region: Region) -> None:
        self._regions.remove(region)

    def __iter__(self) -> Any:
        return iter(self._regions)

    def find(self, ptr: int) -> Region:
        for region in self._regions:
            if region.holds(ptr):
                return region
        raise ValueError(f"address {ptr:#x} is not in device memory")

    def view(self, address: ArrayAddress) -> Array:
        return self.find(address.ptr).view(address)


def memfd(name: str, nbytes: int) -> int:
    """A sparse anonymous file; pages appear as they are touched."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd
