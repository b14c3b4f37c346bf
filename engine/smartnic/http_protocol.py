"""HTTP/1.1 on a connection: uvicorn's protocol with a bound on what is not body."""

from __future__ import annotations

import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from engine.smartnic.errors import headers_too_large

MAX_HEAD_BYTES = 64 << 10
FEED_BYTES = 16 << 10  # what the parser gets at once: the bound is exact to this


class BoundedHttpProtocol(HttpToolsProtocol):
    """Refuses a request line, headers, trailers or chunk extensions beyond MAX_HEAD_BYTES.

    The parser joins a header's pieces anew with each one, so that a large one holds the loop.
    Counted are the bytes that it took since it last reported progress: the end of the headers,
    a piece of body, or the end of the request.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._progress = False

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), FEED_BYTES):
            piece = data[start : start + FEED_BYTES]
            self._progress = False
            super().data_received(piece)
            if self.transport.is_closing():
                return
            self._head_bytes = 0 if self._progress else self._head_bytes + len(piece)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse()
                return

    def on_headers_complete(self) -> None:
        self._progress = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._progress = True
        super().on_message_complete()

    def _refuse(self) -> None:
        """Answer 431 unless another answer is under way, and close."""
        if self.cycle is None or self.cycle.response_complete:
            body = json.dumps(headers_too_large(MAX_HEAD_BYTES).body()).encode()
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
                b"content-type: application/json\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
            )
        self.transport.close()
