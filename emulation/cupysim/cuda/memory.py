"""Device memory of a client: pointers and CuPy's caching pool.

As in CuPy, memory that an array gives back is kept for later arrays of the same stream, so that
reuse is safe in stream order without waiting.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict, deque
from typing import Any

from emulation.cupysim import client as client_module
from emulation.cupysim.arena import ALIGNMENT, OutOfDeviceMemory
from emulation.cupysim.cuda.stream import current_stream_ptr


class OutOfMemoryError(MemoryError):
    """Device memory is exhausted."""

    def __init__(self, requested: int, free: int, total: int) -> None:
        super().__init__(
            f"Out of memory allocating {requested:,} bytes "
            f"({free:,} of the device's {total:,} bytes are free)."
        )
        self.requested, self.free, self.total = requested, free, total


class BaseMemory:
    """Owner of a stretch of device memory."""

    def __init__(self, ptr: int, size: int) -> None:
        self.ptr = ptr
        self.size = size
        self.device_id = 0


class UnownedMemory(BaseMemory):
    """Memory that someone else owns: an exported window, or another client's."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        super().__init__(ptr, size)
        self.owner = owner


class PooledMemory(BaseMemory):
    """Goes back to its pool when it dies."""

    def __init__(self, ptr: int, size: int, stream: int, pool: MemoryPool) -> None:
        super().__init__(ptr, size)
        self._stream = stream
        self._pool = pool
        self._generation = pool.generation

    def __del__(self) -> None:
        if hasattr(self, "_generation") and self._generation == self._pool.generation:
            self._pool.give_back(self.ptr, self.size, self._stream)


class MemoryPointer:
    """A device address inside a memory, which it keeps alive."""

    def __init__(self, mem: BaseMemory, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset
        self.device_id = 0

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def __int__(self) -> int:
        return self.ptr

    def __repr__(self) -> str:
        return f"<MemoryPointer {self.ptr:#x}>"


class MemoryPool:
    """The default pool. Blocks are cached by stream and size."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._returned: deque[tuple[int, int, int]] = deque()  # finalizers may run in the lock
        self.generation = 0  # raised when the device is another one
        self._used = 0
        self._total = 0

    def give_back(self, ptr: int, size: int, stream: int) -> None:
        self._returned.append((ptr, size, stream))

    def _collect(self) -> None:
        while self._returned:
            ptr, size, stream = self._returned.popleft()
            self._free[stream, size].append(ptr)
            self._used -= size

    def malloc(self, nbytes: int) -> MemoryPointer:
        """Raises OutOfMemoryError."""
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        stream = current_stream_ptr()
        with self._lock:
            self._collect()
            cached = self._free[stream, size]
            ptr = cached.pop() if cached else self._allocate(size)
            self._used += size
        return MemoryPointer(PooledMemory(ptr, size, stream, self), 0)

    def _allocate(self, size: int) -> int:
        client = client_module.current()
        try:
            ptr = int(client.request("alloc", size))
        except OutOfDeviceMemory:
            self._release_all(client, wait=True)
            try:
                ptr = int(client.request("alloc", size))
            except OutOfDeviceMemory as error:
                raise OutOfMemoryError(*error.args) from None
        self._total += size
        return ptr

    def _release_all(self, client: client_module.Client, *, wait: bool) -> None:
        streams = set()
        for (stream, size), blocks in self._free.items():
            for ptr in blocks:
                client.post("free", stream, ptr)
                self._total -= size
                streams.add(stream)
        self._free.clear()
        for stream in streams if wait else ():
            client.request("sync", stream)

    def free_all_blocks(self, stream: object = None) -> None:
        """Gives cached memory back to the device, in the order of the streams that used it."""
        with self._lock:
            self._collect()
            client = client_module.connected()
            if client is not None and not client.closed:
                self._release_all(client, wait=False)

    def used_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self._used

    def total_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self._total

    def free_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self._total - self._used

    def n_free_blocks(self) -> int:
        with self._lock:
            self._collect()
            return sum(len(blocks) for blocks in self._free.values())

    def reset(self) -> None:
        """Forgets every block: they belonged to a device that is gone."""
        with self._lock:
            self._returned.clear()
            self._free.clear()
            self._used = self._total = 0
            self.generation += 1


default_pool = MemoryPool()


def _after_fork() -> None:
    default_pool._lock = threading.Lock()  # another thread of the parent may have held it
    default_pool.reset()


os.register_at_fork(after_in_child=_after_fork)


def alloc(size: int) -> MemoryPointer:
    return default_pool.malloc(size)
