"""Links: how the SmartNIC reaches one port of the window.

A link is nothing but one-sided memory operations, the ones that RDMA has: WRITE and READ at an
offset. Everything above (slots, credits, tokens) is the ring protocol's, the same over every link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class LinkError(Exception):
    """The link broke; what was in flight is lost, and a new link must be made."""


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """What a link says of itself, for the ready line, /server_info and reports."""

    kind: str
    window: str
    description: str


class Link(Protocol):
    """One port of the window. Thread-safe; every method raises LinkError once the link is lost."""

    info: LinkInfo

    def write(self, chain: Sequence[tuple[int, bytes]]) -> None:
        """WRITE each (offset in bytes, data) of the chain; each is visible before the next."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """READ `nbytes` at `offset`."""

    def read_tokens(self, head: int, timeout_s: float) -> np.ndarray:
        """Entries of the token ring from log index `head` on: protocol.TOKEN_ENTRY, whole ones
        only.

        Waits up to `timeout_s` for the first, without the interpreter's lock; empty if none came.
        """

    def close(self) -> None:
        """Release the link; idempotent."""
