"""The token ring over a link that can only copy: looked at again and again, a batch at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from engine.protocol import TOKEN_ENTRY, Geometry
from engine.ring_library import ring_library

MIN_BATCH, MAX_BATCH = 32, 1024  # entries in one look
MIN_PAUSE_S, MAX_PAUSE_S = 100e-6, 2e-3  # between two looks that found nothing
ENTRY_BYTES = TOKEN_ENTRY.dtype.itemsize
LANDING_BYTES = MAX_BATCH * ENTRY_BYTES
Fetch = Callable[[int, int], None]


class TokenReader:
    """`read` is Link.read_tokens, for one caller at a time. `address`: room for LANDING_BYTES.

    It does not keep `fetch`: a link and its reader that hold each other would be taken apart by the
    collector, in any order, and verbs objects insist on theirs.
    """

    def __init__(self, geometry: Geometry, address: int) -> None:
        self._num_entries = geometry.token_ring_entries
        self._tokens_offset = geometry.tokens_offset
        self._address = address
        self._batch_entries = MIN_BATCH
        self.lock = threading.Lock()

    def read(self, head: int, timeout_s: float, fetch: Fetch) -> np.ndarray:
        """Whole entries from log index `head` on; empty if none came within `timeout_s`.

        `fetch(offset, nbytes)` copies bytes of the port to `address`, and returns when they are
        there.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = MIN_PAUSE_S
        with self.lock:
            while True:
                entries = self._read_batch(head, fetch)
                left_s = deadline - time.monotonic()
                if len(entries) or left_s <= 0:
                    return entries
                time.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _read_batch(self, head: int, fetch: Fetch) -> np.ndarray:
        """One look at entries from `head` on, up to the ring's end; the whole ones of them."""
        num_entries = self._num_entries
        place = head & (num_entries - 1)
        wanted = min(self._batch_entries, num_entries - place)
        fetch(self._tokens_offset + place * ENTRY_BYTES, wanted * ENTRY_BYTES)
        batch = np.empty(wanted, TOKEN_ENTRY.dtype)
        # The copy holds the ring's places from `place` on: its place 0 would lie before it.
        ring = self._address - place * ENTRY_BYTES
        count = ring_library().bb_take_entries(ring, num_entries, head, batch.ctypes.data, wanted)
        self._batch_entries = min(max(2 * count, MIN_BATCH), MAX_BATCH)
        return batch[:count]
