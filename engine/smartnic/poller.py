"""The thread that waits for tokens, so that the event loop never does.

It waits inside the link's native code without the GIL. The times of a request that ended it reads
too: over RDMA that is a journey of its own. With no request in flight it waits for the
event loop instead and the ring is not looked at. Batches that the loop has not taken yet pile up
behind one pending wake-up, up to a limit: then the thread waits, the token ring fills, and the
device pauses. The loop takes one slice at a time, so that no burst keeps other work from its turn.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.ring import RingClient, SlotTimes

WAIT_S = 0.05  # how long the ring may still be polled after the last request
RETRY_S = 0.2
SLICE_ROWS = 256
MAX_ROWS_AHEAD = 1024

Row = tuple[int, int, int, int, float, int, int, int]
"""A token entry's fields in the protocol's order."""
REASON = 6  # its place in there
SLOT = 1


class Poller:
    """Reads the token ring while requests are in flight.

    deliver: gets every batch, in order, in the event loop's thread, and with it the times of the
    slots whose requests end in it. failed: gets a read's error, there too; reading is tried again
    until it works or the poller is closed.
    """

    def __init__(
        self,
        ring: RingClient,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[list[Row], dict[int, SlotTimes]], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._ring = ring
        self._loop = loop
        self._deliver = deliver
        self._failed = failed
        self._batches: deque[tuple[list[Row], dict[int, SlotTimes]]] = deque()
        self._signalled = False
        self._num_handed = 0  # rows; written by the thread alone
        self._num_taken = 0  # rows; written by the loop alone
        self._room = threading.Event()
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="token-poller", daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Requests are in flight."""
        if not self._wanted.is_set():
            self._wanted.set()

    def park(self) -> None:
        """None is in flight any more."""
        self._wanted.clear()

    def close(self) -> None:
        """Stop the thread; idempotent."""
        self._closed.set()
        self._wanted.set()
        self._room.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wanted.wait()
            try:
                rows = self._ring.read_tokens(WAIT_S).tolist()
                times = {row[SLOT]: self._ring.slot_times(row[SLOT]) for row in rows if row[REASON]}
            except Exception as error:
                self._call(self._failed, error)
                self._closed.wait(RETRY_S)
                continue
            if rows:
                self._hand_over(rows, times)
                self._wait_for_room()

    def _hand_over(self, rows: list[Row], times: dict[int, SlotTimes]) -> None:
        # Append first, look second; _drain clears first, takes second: no batch stays behind.
        self._num_handed += len(rows)
        for start in range(0, len(rows), SLICE_ROWS):
            self._batches.append((rows[start : start + SLICE_ROWS], times))
        if not self._signalled:
            self._signalled = True
            self._call(self._drain)

    def _drain(self) -> None:
        self._signalled = False
        if not self._batches:
            return
        rows, times = self._batches.popleft()
        self._num_taken += len(rows)
        if not self._room.is_set():
            self._room.set()
        if self._batches and not self._signalled:
            self._signalled = True
            self._loop.call_soon(self._drain)
        self._deliver(rows, times)

    def _wait_for_room(self) -> None:
        # Cleared before the look: what the loop takes after the look sets it again.
        while self._num_handed - self._num_taken > MAX_ROWS_AHEAD and not self._closed.is_set():
            self._room.clear()
            if self._num_handed - self._num_taken > MAX_ROWS_AHEAD:
                self._room.wait(RETRY_S)

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop is closed: the process ends
            self._closed.set()
