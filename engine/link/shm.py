"""The shared-memory link: the port is mapped into the SmartNIC's process.

Stands for RDMA where the kernel has none and nobody wants emulated machines. Only the port's own
bytes are mapped, as only they would be registered.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np

from engine.link import LinkError, LinkInfo
from engine.protocol import TOKEN_ENTRY, Geometry
from engine.ring_library import ring_library

MAX_BATCH = 4096


class SharedMemoryLink:
    """`memory` is the port: writable u8[geometry.port_bytes], in memory shared with the device."""

    def __init__(self, memory: np.ndarray, geometry: Geometry, window: str) -> None:
        if memory.dtype != np.uint8 or memory.size < geometry.port_bytes:
            raise ValueError(
                f"a port has {geometry.port_bytes} bytes, "
                f"the memory {memory.nbytes} of {memory.dtype}"
            )
        self.info = LinkInfo("shm", window, "shared memory; no NIC, no network between the roles")
        self.memory = memory
        self.address: int = memory.ctypes.data
        """Where the port begins in this process."""
        self.geometry = geometry
        self._library = ring_library()
        self._batch = np.zeros(MAX_BATCH, TOKEN_ENTRY.dtype)
        self._is_open = True

    @classmethod
    def from_fd(cls, fd: int, offset: int, geometry: Geometry, window: str) -> SharedMemoryLink:
        """Map the port that starts at byte `offset` (a multiple of the page size) of `fd`."""
        mapping = mmap.mmap(fd, geometry.port_bytes, mmap.MAP_SHARED, offset=offset)
        return cls(np.frombuffer(mapping, np.uint8), geometry, window)

    def write(self, chain: Sequence[tuple[int, bytes]]) -> None:
        for offset, data in chain:
            self._check(offset, len(data))
            self._library.bb_write(self.address + offset, data, len(data))

    def read(self, offset: int, nbytes: int) -> bytes:
        self._check(offset, nbytes)
        return ctypes.string_at(self.address + offset, nbytes)

    def read_tokens(self, head: int, timeout_s: float) -> np.ndarray:
        self._check(0, 0)
        count = self._library.bb_wait_entries(
            self.address + self.geometry.tokens_offset,
            self.geometry.token_ring_entries,
            head,
            self._batch.ctypes.data,
            MAX_BATCH,
            max(int(timeout_s * 1e9), 0),
        )
        return self._batch[:count].copy()

    def close(self) -> None:
        self._is_open = False

    def _check(self, offset: int, nbytes: int) -> None:
        if not self._is_open:
            raise LinkError("the link is closed")
        if offset < 0 or offset + nbytes > self.geometry.port_bytes:
            raise LinkError(f"bytes {offset} to {offset + nbytes} are outside the port")
