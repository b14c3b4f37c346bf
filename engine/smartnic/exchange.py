"""One HTTP exchange over ASGI: a request, its body, and the response to it."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from engine.smartnic.errors import ApiError

MAX_BODY_BYTES = 2 << 20  # parsing holds the interpreter: more would delay other requests
DISCARD_BYTES = 64 << 20  # of a body that is too large, so that the client reads the answer
REQUEST_ID = re.compile(r"[!-~]{1,128}")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]


class ClientLeftError(Exception):
    """The client closed the connection before its request was complete."""


class Exchange:
    """`scope`, `receive` and `send` of ASGI, with what every handler needs of them."""

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.started = False
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._receive = receive
        self._send = send
        given = self.header(b"x-request-id")
        self.request_id = given if given and REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

    def header(self, name: bytes) -> str | None:
        """A request header by its lower-case name."""
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    async def read_json(self) -> dict[str, Any]:
        """The body as a JSON object; raises ApiError 400 or 413, or ClientLeftError."""
        return parse_object(await self._read_body())

    async def _read_body(self) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            chunk = message.get("body", b"")
            size += len(chunk)
            if size <= MAX_BODY_BYTES:
                chunks.append(chunk)
            else:
                chunks.clear()
            if not message.get("more_body", False) or size > DISCARD_BYTES:
                break
        if size > MAX_BODY_BYTES:
            raise ApiError(
                413,
                f"The request body is larger than {MAX_BODY_BYTES} bytes.",
                code="body_too_large",
            )
        return b"".join(chunks)

    def on_disconnect(self, callback: Callable[[], None]) -> asyncio.Task[None]:
        """Call back when the client leaves. Only after the body was read; cancel it at the end."""

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            callback()

        return asyncio.get_running_loop().create_task(watch())

    async def send(
        self, status: int, body: bytes, content_type: bytes, headers: Headers = ()
    ) -> None:
        """A whole response."""
        await self._start(
            status,
            [
                (b"content-type", content_type),
                (b"content-length", str(len(body)).encode()),
                *headers,
            ],
        )
        await self._send({"type": "http.response.body", "body": body})

    async def send_json(self, status: int, value: Any, headers: Headers = ()) -> None:
        """A whole response of JSON."""
        body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
        await self.send(status, body, b"application/json", headers)

    async def send_error(self, error: ApiError) -> None:
        """A whole response in OpenAI's error shape."""
        headers = error.headers()
        if error.status == 413:
            headers = [*headers, (b"connection", b"close")]
        await self.send_json(error.status, error.body(), headers)

    async def start_events(self) -> None:
        """Begin a stream of server-sent events."""
        await self._start(
            200,
            [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ],
        )

    async def send_event(self, event: bytes, more: bool = True) -> None:
        """One whole server-sent event; waits while the client is behind."""
        await self._send({"type": "http.response.body", "body": event, "more_body": more})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        headers.append((b"x-request-id", self.request_id.encode("latin-1")))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def parse_object(body: bytes) -> dict[str, Any]:
    """JSON text to an object; ApiError 400 for anything else."""
    try:
        value = json.loads(body.decode())
    except RecursionError:
        raise ApiError(400, "The JSON body is nested too deeply.", code="invalid_json") from None
    except ValueError as error:  # also UnicodeDecodeError and numbers of too many digits
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if type(value) is not dict:
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return value
