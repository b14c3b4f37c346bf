"""Server-sent events, one per token: built from templates in which only the text is escaped."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring
from typing import Any

from engine.smartnic.errors import ApiError
from engine.smartnic.exchange import Exchange
from engine.smartnic.logprobs import TokenLogprob
from engine.smartnic.reply import Piece, Reply

DONE = b"data: [DONE]\n\n"
quote: Callable[[str], str] = encode_basestring
"""A string as JSON text, not restricted to ASCII."""


def compact(value: Any) -> str:
    """JSON text without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def event(value: Any) -> bytes:
    """Any JSON value as one event."""
    return f"data: {compact(value)}\n\n".encode()


def error_event(error: ApiError) -> bytes:
    """An error after the first byte."""
    return event(error.body())


class PieceEvents:
    """Renders the pieces of one reply.

    head: the chunk's fields before `choices`, e.g. {"id": ..., "object": ...}. chat: pieces are
    deltas, of which a choice's first names the role. usage: called with the piece for the chunk's
    `usage`, where the client wants it in every chunk; null_usage: it wants it only at the end.
    logprobs: makes the field of that name for pieces that have any.
    """

    def __init__(
        self,
        head: dict[str, Any],
        *,
        chat: bool,
        null_usage: bool = False,
        usage: Callable[[Piece], dict[str, Any]] | None = None,
        prompt_ids: list[list[int]] | None = None,
        logprobs: Callable[[Sequence[TokenLogprob]], dict[str, Any]] | None = None,
    ) -> None:
        self._head = "data: " + compact(head)[:-1] + ',"choices":[{"index":'
        self._chat = chat
        self._usage = usage
        self._tail = ',"usage":null}\n\n' if null_usage else "}\n\n"
        self._prompt_ids = prompt_ids
        self._logprobs = logprobs
        self._begun: set[int] = set()
        if chat:
            self._before_text, self._before_logprobs = ',"delta":{"content":', '},"logprobs":'
        else:
            self._before_text, self._before_logprobs = ',"text":', ',"logprobs":'
        self._after_text = self._before_logprobs + "null"

    def render(self, piece: Piece) -> bytes:
        """One event."""
        index, text, ids, finish, _, logprobs = piece
        before, after = self._before_text, self._after_text
        if logprobs and self._logprobs is not None:
            after = self._before_logprobs + compact(self._logprobs(logprobs))
        extra = ""
        if index not in self._begun:
            self._begun.add(index)
            if self._chat:
                before = ',"delta":{"role":"assistant","content":'
            if self._prompt_ids is not None:
                extra = f',"prompt_token_ids":{compact(self._prompt_ids[index])}'
        if self._prompt_ids is not None:
            extra += f',"token_ids":{compact(ids)}'
        reason = "null" if finish is None else f'"{finish}"'
        tail = (
            self._tail if self._usage is None else f',"usage":{compact(self._usage(piece))}}}\n\n'
        )
        return (
            f"{self._head}{index}{before}{quote(text)}{after}"
            f',"finish_reason":{reason}{extra}}}]{tail}'
        ).encode()


async def stream(
    exchange: Exchange,
    reply: Reply,
    render: Callable[[Piece], bytes],
    usage: Callable[[], dict[str, Any]] | None,
) -> None:
    """Send a reply's pieces as they come, then usage where it is asked for, then [DONE]."""
    await exchange.start_events()
    send = exchange.send_event
    while not reply.ended or reply.has_pieces:
        for piece in await reply.take():
            reply.sending = True
            await send(render(piece))
            reply.sending = False
    if reply.abandoned:
        return
    if reply.error is not None:
        await send(error_event(reply.error))
    elif usage is not None:
        await send(event(usage()))
    await send(DONE, more=False)
