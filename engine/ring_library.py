"""The SmartNIC's native functions (engine/csrc/client.cpp): built by the host compiler at first
use, or brought along where there is no compiler (the emulated machines).
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from engine import native

CSRC = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt" / "ring-client.so"


@functools.cache
def ring_library() -> ctypes.CDLL:
    """The library with its signatures set; calls run without the interpreter's lock."""
    path = PREBUILT
    if not path.exists():
        path = native.build_library([CSRC / "client.cpp"], include_dirs=[CSRC], name="ring-client")
    library = ctypes.CDLL(str(path))
    pointer, u64 = ctypes.c_void_p, ctypes.c_uint64
    library.bb_crc32c.argtypes = [pointer, ctypes.c_size_t]
    library.bb_crc32c.restype = ctypes.c_uint32
    library.bb_write.argtypes = [pointer, ctypes.c_char_p, ctypes.c_size_t]
    library.bb_write.restype = None
    library.bb_take_entries.argtypes = [pointer, u64, u64, pointer, ctypes.c_int]
    library.bb_wait_entries.argtypes = [pointer, u64, u64, pointer, ctypes.c_int, u64]
    library.bb_produce.argtypes = [pointer, u64, pointer, u64, u64, u64, u64]
    library.bb_produce.restype = u64
    return library


def crc32c(data: bytes) -> int:
    """CRC32C (RFC 3720, appendix B.4) of `data`."""
    return int(ring_library().bb_crc32c(data, len(data)))
