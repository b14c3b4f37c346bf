"""The guests' kernel, unpacked.

An ELF vmlinux boots through PVH (Xen's boot protocol, which QEMU speaks) and so skips the
decompressor, which costs seconds under software emulation.
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable
from pathlib import Path

_SCHEMES: tuple[tuple[bytes, Callable[[bytes], bytes]], ...] = (
    (b"\xfd7zXZ\0", lambda data: lzma.LZMADecompressor().decompress(data)),
    (b"\x1f\x8b\x08", lambda data: zlib.decompressobj(31).decompress(data)),
)


def unpack_kernel(image: Path) -> bytes:
    """The ELF inside a bzImage; the bzImage itself where it is packed in a way unknown here (it
    boots too, later).
    """
    data = image.read_bytes()
    for magic, decompress in _SCHEMES:
        start = data.find(magic)
        while start >= 0:
            try:
                kernel = decompress(data[start:])
            except (lzma.LZMAError, zlib.error):
                kernel = b""
            if kernel.startswith(b"\x7fELF"):
                return kernel
            start = data.find(magic, start + 1)
    return data
