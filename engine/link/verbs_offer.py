"""The offer: what the host tells a SmartNIC of the window and the model, kept in the window's own
memory, behind the ports.

So the RNIC's side can answer a SmartNIC by itself, in a machine of its own, with the host process
frozen or dead. It is not registered: no SmartNIC can reach it. The trailer is the last 32 bytes of
the memory; the text (JSON) ends where the trailer begins. A text is there when the trailer says
so, and whole when its checksum fits.
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

TRAILER = struct.Struct("<8sQQQ")  # magic, serial number, text bytes, CRC32 of all before
MAGIC = b"BBOFFER1"


def write_offer(memory: memoryview, offer: dict[str, Any]) -> None:
    """Put `offer` (JSON data) at the end of `memory` (writable bytes); ValueError if it does not
    fit. Ports must not reach there: see offer_bytes.
    """
    text = json.dumps(offer, separators=(",", ":")).encode()
    end = len(memory) - TRAILER.size
    if len(text) > end:
        raise ValueError(f"an offer of {len(text)} bytes does not fit into {len(memory)}")
    _, serial, _, _ = TRAILER.unpack(memory[end:])
    withdraw_offer(memory)
    memory[end - len(text) : end] = text
    serial += 1
    memory[end:] = TRAILER.pack(MAGIC, serial, len(text), _checksum(text, serial))


def withdraw_offer(memory: memoryview) -> None:
    """Take the offer back: before the window is laid out anew."""
    end = len(memory) - TRAILER.size
    _, serial, _, _ = TRAILER.unpack(memory[end:])
    memory[end:] = TRAILER.pack(bytes(8), serial, 0, 0)


def offer_bytes(offer: dict[str, Any]) -> int:
    """Room that an offer needs."""
    return len(json.dumps(offer, separators=(",", ":")).encode()) + TRAILER.size


def offer_serial(memory: memoryview) -> int:
    """Number of the offer that is there now; 0 for none. It changes with every new one."""
    magic, serial, _, _ = TRAILER.unpack(memory[len(memory) - TRAILER.size :])
    return int(serial) if magic == MAGIC else 0


def read_offer(memory: memoryview) -> dict[str, Any] | None:
    """The offer, or None where there is none (yet)."""
    end = len(memory) - TRAILER.size
    magic, serial, num_bytes, checksum = TRAILER.unpack(memory[end:])
    if magic != MAGIC or num_bytes > end:
        return None
    text = bytes(memory[end - num_bytes : end])
    if _checksum(text, serial) != checksum:
        return None  # being written
    offer = json.loads(text)
    return offer if isinstance(offer, dict) else None


def _checksum(text: bytes, serial: int) -> int:
    return zlib.crc32(text, serial & 0xFFFFFFFF)
