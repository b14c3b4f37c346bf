"""A lean streaming client: many requests over one event loop, a timestamp for each token event.

It only counts events as they arrive, so that the client's own work stays small beside the work
that it measures.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

EVENT = b"data: {"
DONE = b"data: [DONE]"
ALPHABET = "abcdefghijklmnopqrstuvwxyz "


@dataclass(frozen=True, slots=True)
class Request:
    """When a request is sent (seconds from the begin), and its lengths in tokens."""

    at_s: float
    num_prompt: int
    num_output: int


@dataclass(slots=True)
class Timing:
    """What a client saw of one request; monotonic seconds. Empty `times_s`: no token came."""

    sent_s: float
    num_output: int
    times_s: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.times_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None with fewer than two tokens."""
        count = len(self.times_s)
        return (self.times_s[-1] - self.times_s[0]) / (count - 1) if count > 1 else None


class _Stream(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, timing: Timing, body: bytes, done: asyncio.Future[None]) -> None:
        self._timing, self._body, self._done = timing, body, done
        self._tail = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are asyncio's by behaviour, not by class.
        self.transport = cast(asyncio.Transport, transport)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Length: {len(self._body)}\r\n"
        self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + self._body)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        joined = self._tail + data
        self._tail = joined[-(len(DONE) - 1) :]
        # An event whose mark is wholly in the tail was counted with the piece before.
        count = joined.count(EVENT) - (joined[: len(joined) - len(data)].count(EVENT))
        if b'"error"' in data or b"HTTP/1.1 4" in data or b"HTTP/1.1 5" in data:
            self._timing.error = data.decode(errors="replace")[-300:]
            return
        self._timing.times_s.extend([now] * count)
        if DONE in joined:
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done() and not self._timing.error:
            self._timing.error = f"the connection was lost ({error or 'closed'})"
        self._finish()

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(None)
        if self.transport is not None:
            self.transport.close()


class Client:
    """Sends requests to one server and keeps what it sees in `timings`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self.timings: list[Timing] = []
        self._open: list[tuple[_Stream, asyncio.Future[None]]] = []

    async def send(self, num_prompt: int, num_output: int) -> None:
        """One request; returns when its last token came or it failed."""
        timing = Timing(time.monotonic(), num_output)
        self.timings.append(timing)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stream = _Stream(timing, body_of(num_prompt, num_output), done)
        self._open.append((stream, done))
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: stream, self._host, self._port
            )
            await done
        except OSError as error:
            timing.error = f"cannot connect: {error}"
        finally:
            self._open.remove((stream, done))

    async def play(self, requests: Sequence[Request], deadline_s: float) -> None:
        """Send each at its time, whatever became of the others (an open loop); wait for all.

        Requests that have not ended at monotonic `deadline_s` are cut off, with an error.
        """
        begin_s = time.monotonic()
        tasks = []
        for request in requests:
            await asyncio.sleep(max(0.0, begin_s + request.at_s - time.monotonic()))
            tasks.append(asyncio.create_task(self.send(request.num_prompt, request.num_output)))
        await asyncio.wait(tasks, timeout=max(0.1, deadline_s - time.monotonic()))
        self.cut("not answered in time")
        await asyncio.gather(*tasks)

    def cut(self, reason: str = "") -> None:
        """Close every open connection; the server cancels these requests."""
        for stream, done in list(self._open):
            if not done.done():
                stream._timing.error = reason
                done.set_result(None)
            if stream.transport is not None:
                stream.transport.abort()


def body_of(num_prompt: int, num_output: int) -> bytes:
    """A request of about so many prompt tokens (one a byte) and exactly so many of output."""
    repeats = -(-num_prompt // len(ALPHABET))
    return json.dumps(
        {
            "prompt": (ALPHABET * repeats)[:num_prompt],
            "max_tokens": num_output,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
        }
    ).encode()
