"""The device process's own memory: one sparse memfd and a first-fit allocator over it."""

from __future__ import annotations

import bisect
import mmap
import threading

from emulation.cupysim.region import Region, memfd

ALIGNMENT = 512  # bytes, as CuPy's pool rounds


class OutOfDeviceMemory(Exception):  # noqa: N818 - crosses the wire as a fact, not as an error
    """(requested, free, total) bytes."""


class Arena:
    """Allocates from device memory. Freed pages go back to the machine and read as zero."""

    def __init__(self, nbytes: int) -> None:
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.region = Region(memfd("cupysim-memory", nbytes), nbytes)
        self._lock = threading.Lock()
        # Free stretches as parallel sorted lists: offset and length, never adjacent.
        self._offsets = [0]
        self._lengths = [nbytes]
        self._allocated: dict[int, int] = {}

    @property
    def total(self) -> int:
        return self.region.nbytes

    @property
    def free_bytes(self) -> int:
        return sum(self._lengths)

    def allocate(self, nbytes: int) -> int:
        """Pointer to at least `nbytes` bytes; raises OutOfDeviceMemory."""
        wanted = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        with self._lock:
            for index, length in enumerate(self._lengths):
                if length < wanted:
                    continue
                offset = self._offsets[index]
                if length == wanted:
                    del self._offsets[index], self._lengths[index]
                else:
                    self._offsets[index] += wanted
                    self._lengths[index] -= wanted
                self._allocated[offset] = wanted
                return self.region.base + offset
            raise OutOfDeviceMemory(nbytes, self.free_bytes, self.total)

    def free(self, ptr: int) -> None:
        offset = ptr - self.region.base
        with self._lock:
            length = self._allocated.pop(offset, None)
            if length is None:
                raise ValueError(f"address {ptr:#x} was not allocated, or was freed before")
            self._drop_pages(offset, length)
            self._give_back(offset, length)

    def _drop_pages(self, offset: int, length: int) -> None:
        """Only whole pages, and only where nobody else's bytes share them."""
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (offset + length) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self.region.mapping.madvise(mmap.MADV_REMOVE, first, last - first)

    def _give_back(self, offset: int, length: int) -> None:
        index = bisect.bisect(self._offsets, offset)
        if index < len(self._offsets) and offset + length == self._offsets[index]:
            length += self._lengths.pop(index)
            self._offsets.pop(index)
        if index > 0 and self._offsets[index - 1] + self._lengths[index - 1] == offset:
            self._lengths[index - 1] += length
        else:
            self._offsets.insert(index, offset)
            self._lengths.insert(index, length)
