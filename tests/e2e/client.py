"""Streams as a client sees them, many at a time, whatever becomes of the server.

Nothing that a server does raises here: a reply says how it ended, so that tests can count ends.
Requests are HTTP/1.0, whose body ends with the connection.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

PATH = "/v1/completions"
TIMEOUT_S = 120.0
MAX_LINE_BYTES = 1 << 20


@dataclass(slots=True)
class Reply:
    """One streamed request, from its start to whatever ended it. Times are monotonic seconds."""

    body: dict[str, Any]
    started_s: float = 0.0
    ended_s: float = 0.0
    status: int = 0
    """0: the connection ended, or was never made, before a status line came."""
    arrivals_s: list[float] = field(default_factory=list)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False
    """Whether [DONE] came, or the whole of a response with another status than 200."""

    @property
    def ends(self) -> list[str]:
        """Every way in which it ended; exactly one is right."""
        if not self.is_done:
            return ["cut", *self.finish_reasons, *("error" for _ in self.errors)]
        if self.status != 200:
            return [f"status {self.status}"]
        return [*self.finish_reasons, *("error" for _ in self.errors)]

    @property
    def is_complete(self) -> bool:
        """Whether it ended as a request should."""
        return self.ends in (["stop"], ["length"])

    @property
    def ttft_s(self) -> float:
        """From the request to the first text."""
        return self.arrivals_s[0] - self.started_s

    @property
    def tpot_s(self) -> float:
        """Mean time between tokens after the first."""
        spans = max(len(self.token_ids) - 1, 1)
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / spans

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.errors.append(event["error"])
        for choice in event.get("choices", ()):
            if choice.get("token_ids"):
                self.arrivals_s.append(time.monotonic())
                self.token_ids += choice["token_ids"]
            self.text += choice.get("text") or ""
            if choice.get("finish_reason"):
                self.finish_reasons.append(choice["finish_reason"])


async def stream(url: str, body: dict[str, Any], *, timeout_s: float = TIMEOUT_S) -> Reply:
    """One request to /v1/completions, read to its end."""
    body = {**body, "stream": True, "return_token_ids": True}
    reply = Reply(body, started_s=time.monotonic())
    try:
        async with asyncio.timeout(timeout_s):
            await _exchange(url, reply)
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        pass  # the reply says so: it is not done
    reply.ended_s = time.monotonic()
    return reply


async def _exchange(url: str, reply: Reply) -> None:
    parts = urlsplit(url)
    content = json.dumps(reply.body).encode()
    head = f"POST {PATH} HTTP/1.0\r\nHost: e2e\r\nContent-Length: {len(content)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=MAX_LINE_BYTES)
    try:
        writer.write(head.encode() + content)
        words = (await reader.readline()).split()
        if len(words) < 2:
            return
        reply.status = int(words[1])
        while (await reader.readline()).strip():
            pass
        if reply.status != 200:
            reply.errors.append(json.loads(await reader.read())["error"])
            reply.is_done = True
            return
        while line := await reader.readline():
            if line.startswith(b"data: "):
                reply._take(line[6:].decode().strip())
    finally:
        writer.close()


def run_streams(
    url: str, bodies: Sequence[dict[str, Any]], *, timeout_s: float = TIMEOUT_S
) -> list[Reply]:
    """All at once; the replies in the order of the bodies."""

    async def run() -> list[Reply]:
        return await asyncio.gather(*(stream(url, body, timeout_s=timeout_s) for body in bodies))

    return asyncio.run(run())


class Traffic:
    """Clients that send one request after another until they are told to stop. A context manager.

    make_body: called with a running number for each request. After the block, `replies` has every
    request that was sent, each with its end.
    """

    def __init__(
        self, url: str, make_body: Callable[[int], dict[str, Any]], *, num_clients: int
    ) -> None:
        self.replies: list[Reply] = []
        self._url = url
        self._make_body = make_body
        self._num_clients = num_clients
        self._next = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(self._num_clients)))

    async def _client(self) -> None:
        while not self._stop.is_set():
            number, self._next = self._next, self._next + 1
            reply = await stream(self._url, self._make_body(number))
            self.replies.append(reply)
            if not reply.is_complete:
                await asyncio.sleep(0.1)  # a client that is refused comes again, not at once

    def num_complete_since(self, when_s: float) -> int:
        """Requests that began after this moment and are complete."""
        return sum(r.is_complete and r.started_s > when_s for r in list(self.replies))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT_S + 10)
        assert not self._thread.is_alive(), "a request has no end"
