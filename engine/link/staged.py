"""The staged link: the port lies in GPU memory, and this process copies to it and from it.

Stands for a NIC with access to the GPU's memory where there is none: the copies are the GPU's own
copy engines', ordered on one CUDA stream, and no CPU of the host takes part.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from engine.link import LinkError, LinkInfo
from engine.link.token_reader import LANDING_BYTES, TokenReader
from engine.protocol import Geometry

COPY_BYTES = 1 << 16  # one copy of a read; longer ones are done in parts


class Copier(Protocol):
    """Copies between memory of this process, at addresses, and the port, at offsets."""

    lost_errors: tuple[type[Exception], ...]
    """What calls raise once the port's memory is gone."""

    def allocate(self, nbytes: int) -> int:
        """Address of memory of this process that copies go from and to without a detour."""

    def to_port(self, offset: int, address: int, nbytes: int) -> None:
        """Begin a copy; visible before the next one's first byte."""

    def from_port(self, address: int, offset: int, nbytes: int) -> None:
        """Begin a copy, in order with the others."""

    def wait(self) -> None:
        """Until all that was begun is done."""

    def close(self) -> None:
        """Give everything back."""


class CudaCopier:
    """Another process's GPU memory (CUDA IPC): `handle` opens it, the port is at `offset` in it."""

    def __init__(self, handle: bytes, offset: int) -> None:
        from cuda.bindings import runtime as cudart

        from engine.device.cuda_call import CudaError, checked

        self._call = checked
        self.lost_errors: tuple[type[Exception], ...] = (CudaError,)
        opened = cudart.cudaIpcMemHandle_t()
        opened.reserved = handle
        flags = cudart.cudaIpcMemLazyEnablePeerAccess
        self._window = int(checked("cudaIpcOpenMemHandle", opened, flags))
        self._base = self._window + offset
        self._stream: Any = checked("cudaStreamCreateWithFlags", cudart.cudaStreamNonBlocking)
        self._up = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._down = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._allocated: list[int] = []

    def allocate(self, nbytes: int) -> int:
        self._allocated.append(int(self._call("cudaMallocHost", nbytes)))
        return self._allocated[-1]

    def to_port(self, offset: int, address: int, nbytes: int) -> None:
        to = self._base + offset
        self._call("cudaMemcpyAsync", to, address, nbytes, self._up, self._stream)

    def from_port(self, address: int, offset: int, nbytes: int) -> None:
        source = self._base + offset
        self._call("cudaMemcpyAsync", address, source, nbytes, self._down, self._stream)

    def wait(self) -> None:
        self._call("cudaStreamSynchronize", self._stream)

    def close(self) -> None:
        for address in self._allocated:
            self._call("cudaFreeHost", address)
        self._call("cudaStreamDestroy", self._stream)
        self._call("cudaIpcCloseMemHandle", self._window)


class StagedLink:
    """One port through a copier. Thread-safe; see engine.link.Link. Takes the copier over."""

    def __init__(self, copier: Copier, geometry: Geometry, window: str) -> None:
        self.info = LinkInfo("shm", window, "copies into GPU memory; no NIC, no network between")
        self.geometry = geometry
        self._copier = copier
        self._port_bytes = geometry.port_bytes
        self._staging_bytes = max(COPY_BYTES, 2 * geometry.slot_bytes)
        self._staging = copier.allocate(self._staging_bytes)
        self._landing = copier.allocate(COPY_BYTES)
        self._token_landing = copier.allocate(LANDING_BYTES)
        self._reader = TokenReader(geometry, self._token_landing)
        self._lock = threading.Lock()  # the copier and the staging memory
        self._read_lock = threading.Lock()  # the landing place of `read`
        self._failure = ""

    def write(self, chain: Sequence[tuple[int, bytes]]) -> None:
        """Returns when all of the chain is in the port."""
        for offset, data in chain:
            self._check_range(offset, len(data))
        total = sum(len(data) for _, data in chain)
        if total > self._staging_bytes:
            raise ValueError(f"a chain of {total} bytes is longer than {self._staging_bytes}")
        with self._lock:
            self._check_open()
            used = 0
            try:
                for offset, data in chain:
                    ctypes.memmove(self._staging + used, data, len(data))
                    self._copier.to_port(offset, self._staging + used, len(data))
                    used += len(data)
                self._copier.wait()
            except self._copier.lost_errors as error:
                self._fail(error)

    def _fetch(self, address: int, offset: int, nbytes: int) -> None:
        with self._lock:
            self._check_open()
            try:
                self._copier.from_port(address, offset, nbytes)
                self._copier.wait()
            except self._copier.lost_errors as error:
                self._fail(error)

    def read(self, offset: int, nbytes: int) -> bytes:
        self._check_range(offset, nbytes)
        parts = []
        with self._read_lock:
            for start in range(0, nbytes, COPY_BYTES):
                size = min(nbytes - start, COPY_BYTES)
                self._fetch(self._landing, offset + start, size)
                parts.append(ctypes.string_at(self._landing, size))
        return b"".join(parts)

    def read_tokens(self, head: int, timeout_s: float) -> np.ndarray:
        return self._reader.read(head, timeout_s, self._fetch_tokens)

    def _fetch_tokens(self, offset: int, nbytes: int) -> None:
        self._fetch(self._token_landing, offset, nbytes)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._failure == "closed":
                return
            was_lost, self._failure = bool(self._failure), "closed"
        with self._read_lock, self._reader.lock, self._lock:  # readers have left by now
            if not was_lost:
                self._copier.close()

    def _check_range(self, offset: int, nbytes: int) -> None:
        if offset < 0 or offset + nbytes > self._port_bytes:
            raise LinkError(f"bytes {offset} to {offset + nbytes} are outside the port")

    def _check_open(self) -> None:
        if self._failure:
            raise LinkError(f"the staged link is {self._failure}")

    def _fail(self, error: Exception) -> None:
        self._failure = f"lost: {error}"
        raise LinkError(f"the staged link is {self._failure}") from error
