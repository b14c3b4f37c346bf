"""A chat server with known times, to judge the load test by: run with a mode, prints its port.

Headers and the role chunk come at once, the first text after 300 ms, then 20 tokens every 40 ms,
the usage 100 ms later. Modes: ``normal``; ``error`` sends an error event after five tokens;
``cut`` closes the connection there; ``silent-end`` ends without a finish reason; ``refuse``
answers 503.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

FIRST_TEXT_S = 0.300
TOKEN_S = 0.040
NUM_LATER_TOKENS = 20
USAGE_S = 0.100
NUM_BEFORE_FAULT = 5


class Reply:
    """One HTTP reply in the chunked encoding."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def head(self, status: str, content_type: str) -> None:
        """Status line and headers."""
        self._writer.write(
            f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\n"
            "transfer-encoding: chunked\r\n\r\n".encode()
        )
        await self._writer.drain()

    async def send(self, data: str) -> None:
        """One chunk; an empty one ends the reply."""
        encoded = data.encode()
        self._writer.write(f"{len(encoded):x}\r\n".encode() + encoded + b"\r\n")
        await self._writer.drain()

    async def event(self, value: dict[str, Any]) -> None:
        """One server-sent event."""
        await self.send(f"data: {json.dumps(value)}\n\n")


def chunk(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    """A chat completion chunk."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


async def answer(reply: Reply, mode: str) -> bool:
    """The streamed answer; whether the connection stays usable."""
    loop = asyncio.get_running_loop()
    await reply.head("200 OK", "text/event-stream")
    await reply.event(chunk({"role": "assistant", "content": ""}))
    start = loop.time()
    for number in range(1 + NUM_LATER_TOKENS):
        await asyncio.sleep(start + FIRST_TEXT_S + number * TOKEN_S - loop.time())
        if number == NUM_BEFORE_FAULT and mode == "cut":
            return False
        if number == NUM_BEFORE_FAULT and mode == "error":
            await reply.event({"error": {"message": "engine lost", "type": "server_error"}})
            break
        await reply.event(chunk({"content": f"w{number} "}))
    else:
        if mode != "silent-end":
            await reply.event(chunk({}, "length"))
        await asyncio.sleep(USAGE_S)
        usage = {"prompt_tokens": 3, "completion_tokens": 1 + NUM_LATER_TOKENS}
        await reply.event({"choices": [], "usage": usage})
    await reply.send("data: [DONE]\n\n")
    await reply.send("")
    return True


async def serve_connection(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mode: str
) -> None:
    """Answer the requests of one connection until it is closed."""
    reply = Reply(writer)
    is_usable = True
    while is_usable:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except (asyncio.IncompleteReadError, ConnectionError):
            break
        lengths = [line for line in head.lower().splitlines() if line.startswith("content-length:")]
        if lengths:
            await reader.readexactly(int(lengths[0].split(":")[1]))
        if head.startswith("GET /v1/models"):
            await reply.head("200 OK", "application/json")
            await reply.send(json.dumps({"object": "list", "data": [{"id": "stub"}]}))
            await reply.send("")
        elif mode == "refuse":
            await reply.head("503 Service Unavailable", "application/json")
            await reply.send(json.dumps({"error": {"message": "full"}}))
            await reply.send("")
        else:
            is_usable = await answer(reply, mode)
    writer.close()


async def main(mode: str) -> None:
    """Serve on a free port of the loopback address until killed."""
    server = await asyncio.start_server(
        lambda reader, writer: serve_connection(reader, writer, mode), "127.0.0.1", 0
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
