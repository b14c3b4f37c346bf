"""Packs a launch's arguments by CuPy's rules: arrays pass their device pointer, None a null
pointer, NumPy scalars their own bytes, Python's int, float and bool 64, 64 and 8 bits.

CUDA takes whatever bytes it is given; here number, size and kind of each argument are checked
against the kernel's parameters.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from emulation.cupysim.cuda.memory import MemoryPointer
from emulation.cupysim.kernels import Signature
from emulation.cupysim.ndarray import ndarray

SLOT_BYTES = 16  # every argument starts on a multiple of it
_KINDS = {"p": "a pointer", "i": "an integer", "f": "a floating-point number", "s": "a structure"}
_NUMPY_KINDS = {"b": "i", "i": "i", "u": "i", "f": "f", "c": "s", "V": "s"}


def _encode(value: Any) -> tuple[bytes, str]:
    """(bytes, kind); an integer may stand for a pointer."""
    if isinstance(value, ndarray):
        return struct.pack("<Q", value.data.ptr), "p"
    if isinstance(value, MemoryPointer):
        return struct.pack("<Q", value.ptr), "p"
    if value is None:
        return bytes(8), "p"
    if isinstance(value, bool):
        return struct.pack("<?", value), "i"
    if isinstance(value, int):
        return struct.pack("<q" if value < 0 else "<Q", value), "i"
    if isinstance(value, float):
        return struct.pack("<d", value), "f"
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        kind = _NUMPY_KINDS.get(value.dtype.kind)
        if kind is not None:
            return value.tobytes(), kind
    raise TypeError(f"Unsupported type {type(value)}")


def _matches(kind: str, wanted: str) -> bool:
    return kind == wanted or {kind, wanted} == {"i", "p"}


def pack_arguments(name: str, signature: Signature, args: Sequence[Any]) -> bytes:
    """Offsets (u32 each), then the arguments. Raises TypeError naming kernel and argument."""
    if len(args) != len(signature.kinds):
        raise TypeError(
            f"kernel {name} takes {len(signature.kinds)} arguments, {len(args)} were given"
        )
    header = -(-4 * len(args) // SLOT_BYTES) * SLOT_BYTES
    offsets: list[int] = []
    body = bytearray()
    for index, value in enumerate(args):
        data, kind = _encode(value)
        wanted, size = signature.kinds[index], signature.sizes[index]
        if len(data) != size or not _matches(kind, wanted):
            raise TypeError(
                f"kernel {name}, argument {index}: {_KINDS[wanted]} of {size} bytes is needed, "
                f"{_KINDS[kind]} of {len(data)} bytes was given ({type(value).__name__}); "
                "pass a NumPy scalar of the parameter's type"
            )
        offsets.append(header + len(body))
        body += data + bytes(-len(data) % SLOT_BYTES)
    packed_offsets = struct.pack(f"<{len(offsets)}I", *offsets)
    return packed_offsets.ljust(header, b"\0") + bytes(body)
