"""One choice: a sequence on the device, and what its tokens mean to the client."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.protocol import EntryKind, FinishReason
from engine.smartnic.detokenizer import Detokenizer
from engine.smartnic.errors import ApiError, engine_lost, invalid
from engine.smartnic.reply import Piece

if TYPE_CHECKING:
    from engine.ring import RequestParams, Ticket

TOKEN = int(EntryKind.TOKEN)
STOP = int(FinishReason.STOP)
FINISH_NAMES = {
    int(FinishReason.STOP): "stop",
    int(FinishReason.LENGTH): "length",
    int(FinishReason.CANCELLED): "abort",
}
CLIENT_ERRORS = {
    FinishReason.ERROR_PARAMETERS: "a sampling parameter is out of the device's range",
    FinishReason.ERROR_TOKEN_ID: "a token id is not in the vocabulary",
    FinishReason.ERROR_CONTEXT: "prompt and completion do not fit into the context",
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a choice's time went, in milliseconds; None where it never got so far, and where the
    client was answered before the device was done (a stop string).

    queue: picked up to admitted. prefill: admitted to first token. decode: first token to the end.
    link: what the way to the device and back added to the first token.
    """

    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    link_ms: float | None = None
    preemptions: int = 0


class Sink(Protocol):
    """Where a choice's pieces go: its request's Reply."""

    def put(self, piece: Piece) -> None: ...

    def fail(self, error: ApiError) -> None: ...


class Choice:
    """Turns the token entries of one sequence into pieces of a reply.

    `finish_reason` is what the client has been told; the device may be done later (a stop string
    matched here, or the client left), and only its terminal entry frees the slot.
    """

    __slots__ = (
        "_detokenizer",
        "_include_stop",
        "_with_ids",
        "finish_reason",
        "finished_ns",
        "first_token_ns",
        "index",
        "num_tokens",
        "params",
        "prompt_ids",
        "reply",
        "submitted_ns",
        "ticket",
        "timing",
    )

    def __init__(
        self,
        index: int,
        reply: Sink,
        params: RequestParams,
        prompt_ids: list[int],
        detokenizer: Detokenizer,
        *,
        include_stop: bool = False,
        with_ids: bool = False,
    ) -> None:
        self.index = index
        self.reply = reply
        self.params = params
        self.prompt_ids = prompt_ids
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.ticket: Ticket | None = None
        self.timing = Timing()
        self.submitted_ns = 0
        self.first_token_ns = 0
        self.finished_ns = 0
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        self._with_ids = with_ids

    def push(self, token: int, kind: int, reason: int, logprob: float) -> bool:
        """Take one entry; True if the sequence ended for the client but not for the device."""
        if self.finish_reason is not None:
            return False
        text, stopped = "", False
        if kind == TOKEN:
            self.num_tokens += 1
            if self.num_tokens == 1:
                self.first_token_ns = time.monotonic_ns()
            if reason != STOP or self._has_text(token, reason):
                text, stopped = self._detokenizer.push(token)
        if reason and reason not in FINISH_NAMES:
            self._fail(reason)
            return False
        finish = None
        if stopped:
            finish = "stop"
        elif reason:
            rest, stopped = self._detokenizer.flush()
            text += rest
            finish = "stop" if stopped else FINISH_NAMES[reason]
        if finish is not None:
            self.finish_reason = finish
            self.finished_ns = time.monotonic_ns()
        if text or finish is not None or self._with_ids:
            ids = (token,) if self._with_ids and kind == TOKEN else ()
            self.reply.put(Piece(self.index, text, ids, finish, self.num_tokens))
        return stopped and not reason

    def _has_text(self, token: int, reason: int) -> bool:
        """Not so for one that ended the sequence, unless the client wants to see its own."""
        return reason != STOP or (self._include_stop and token in self.params.stop_token_ids)

    def _fail(self, reason: int) -> None:
        self.close("error")
        self.reply.fail(device_error(reason))

    def close(self, finish_reason: str) -> None:
        """End the choice without another piece."""
        if self.finish_reason is None:
            self.finish_reason = finish_reason
            self.finished_ns = time.monotonic_ns()


def device_error(reason: int) -> ApiError:
    """The device's terminal error as a client sees it."""
    known = FinishReason(reason) if reason in FinishReason._value2member_map_ else None
    if known in CLIENT_ERRORS:
        return invalid(None, f"The device refused the request: {CLIENT_ERRORS[known]}.")
    name = known.name.removeprefix("ERROR_").lower() if known is not None else str(reason)
    return engine_lost(f"the device ended the request with error {name}")
