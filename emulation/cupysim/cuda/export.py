"""Device memory that another process may reach, and nothing else of it.

Not part of CuPy: it stands for what on real hardware is a memory region registered with an RNIC
(ibv_reg_mr over peer memory, or a dma-buf export). A window is a file of its own, mapped by the
device process at an address of its own; whoever gets the descriptor can map the window and no
other byte of device memory.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import TracebackType

import numpy as np

from emulation.cupysim import client as client_module
from emulation.cupysim.cuda.memory import MemoryPointer, UnownedMemory
from emulation.cupysim.ndarray import ndarray
from emulation.cupysim.region import Region


class SharedWindow:
    """`nbytes` of exported, zeroed device memory.

    `array` is the window as a device array of bytes, `ptr` its device address, `fd` a descriptor
    that another process may mmap (MAP_SHARED) from offset `offset`; pass it on by SCM_RIGHTS, or
    let a child inherit it. With `path` the window lies in an existing file at `offset` (a multiple
    of the page size), which keeps its contents: the file behind an emulated machine's memory,
    for one. The descriptor belongs to the window; closing the window does not unmap it from
    the device, where a running chain may still use it.
    """

    home = "simulated device memory"
    handle = b""  # a file holds it

    def __init__(self, nbytes: int, *, path: str | Path | None = None, offset: int = 0) -> None:
        if nbytes <= 0:
            raise ValueError(f"nbytes={nbytes}: a window has at least one byte")
        if offset % mmap.PAGESIZE or offset < 0 or (path is None and offset):
            raise ValueError(
                f"offset={offset}: it must be a multiple of {mmap.PAGESIZE}, and 0 without a path"
            )
        if path is not None:
            available = Path(path).stat().st_size
            if offset + nbytes > available:
                raise ValueError(
                    f"{path} has {available} bytes, the window needs {offset + nbytes}"
                )
        self.nbytes = nbytes
        self.offset = offset
        self._client = client_module.current()
        where = None if path is None else str(Path(path).absolute())
        self.ptr, fds = self._client.request_with_fds("window_create", nbytes, where, offset)
        self.fd: int = fds[0]
        self._region = Region(self.fd, nbytes, base=self.ptr, offset=offset)
        self._client.regions.add(self._region)
        memory = UnownedMemory(self.ptr, nbytes, owner=self)
        self.array = ndarray((nbytes,), np.uint8, MemoryPointer(memory, 0))

    def close(self) -> None:
        """Gives up the descriptor; later operations on the window's address are refused."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._client.regions.remove(self._region)
            self._client.discard("window_close", self.ptr)

    def __enter__(self) -> SharedWindow:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
