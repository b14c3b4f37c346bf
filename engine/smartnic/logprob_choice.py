"""A choice whose client wants logprobs: they go out with the text of their tokens, never before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.protocol import EntryKind
from engine.smartnic.choice import TOKEN, Choice
from engine.smartnic.detokenizer import Utf8Decoder
from engine.smartnic.errors import ApiError
from engine.smartnic.logprobs import TokenLogprob, token_bytes
from engine.smartnic.reply import Piece, Reply

ALTERNATIVE = int(EntryKind.ALTERNATIVE)


class _Held(NamedTuple):
    """end: how many characters the client must have before it may know of the token."""

    end: int
    logprob: TokenLogprob


class _Telling:
    """Between a choice and its reply: adds to each piece the logprobs of what it completes."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._shown = 0  # characters that the client got
        self.held: deque[_Held] = deque()

    def put(self, piece: Piece) -> None:
        self._shown += len(piece.text)
        told = []
        while self.held and self.held[0].end <= self._shown:
            told.append(self.held.popleft().logprob)
        self._reply.put(piece._replace(logprobs=tuple(told)))

    def fail(self, error: ApiError) -> None:
        self._reply.fail(error)


class LogprobChoice(Choice):
    """A token is told once all of its text is out. What a stop string cuts off, in whole or in
    part, never is; nor is a token that ended the sequence and is not shown.
    """

    __slots__ = ("_alternatives", "_decoded", "_decoder", "_table", "_telling")

    def __init__(
        self, index: int, reply: Reply, *arguments: Any, table: Sequence[bytes], **options: Any
    ) -> None:
        """table: bytes of every token id; the rest is Choice's."""
        self._telling = _Telling(reply)
        super().__init__(index, self._telling, *arguments, **options)
        self._table = table
        self._alternatives: list[tuple[int, float]] = []  # of the token to come
        self._decoder = Utf8Decoder()
        self._decoded = 0  # characters of all tokens, held back or not

    def push(self, token: int, kind: int, reason: int, logprob: float) -> bool:
        """See Choice.push."""
        if kind == ALTERNATIVE:
            self._alternatives.append((token, logprob))
            return False
        if kind == TOKEN:
            alternatives, self._alternatives = tuple(self._alternatives), []
            if self.finish_reason is None and self._has_text(token, reason):
                self._hold(TokenLogprob(token, logprob, alternatives, self._decoded))
        return super().push(token, kind, reason, logprob)

    def _hold(self, logprob: TokenLogprob) -> None:
        text = self._decoder.push(token_bytes(logprob.token, self._table))
        self._decoded += len(text)
        # What it begins it must see out.
        end = self._decoded + self._decoder.is_incomplete
        self._telling.held.append(_Held(end, logprob))
