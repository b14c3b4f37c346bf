"""A choice whose client wants logprobs: they go out with the text of their tokens, never before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.protocol import EntryKind
from engine.smartnic.choice import TOKEN, Choice
from engine.smartnic.detokenizer import Utf8Decoder
from engine.smartnic.logprobs import TokenLogprob, token_bytes
from engine.smartnic.reply import Piece

ALTERNATIVE = int(EntryKind.ALTERNATIVE)


class _Held(NamedTuple):
    """end: how many characters the client must have before it may know of the token."""

    end: int
    logprob: TokenLogprob


class LogprobChoice(Choice):
    """A token is told once all of its text is out. What a stop string cuts off, in whole or in
    part, never is; nor is a token that ended the sequence and is not shown.
    """

    __slots__ = ("_alternatives", "_decoded", "_decoder", "_held", "_shown", "_table")

    def __init__(self, *arguments: Any, table: Sequence[bytes], **options: Any) -> None:
        """table: bytes of every token id; the rest is Choice's."""
        super().__init__(*arguments, **options)
        self._put = self._put_with_logprobs
        self._table = table
        self._alternatives: list[tuple[int, float]] = []  # of the token to come
        self._decoder = Utf8Decoder()
        self._decoded = 0  # characters of all tokens, held back or not
        self._shown = 0  # characters that the client got
        self._held: list[_Held] = []

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
        self._held.append(_Held(end, logprob))

    def _put_with_logprobs(self, piece: Piece) -> None:
        self._shown += len(piece.text)
        count = 0
        while count < len(self._held) and self._held[count].end <= self._shown:
            count += 1
        told = tuple(held.logprob for held in self._held[:count])
        del self._held[:count]
        self.reply.put(piece._replace(logprobs=told))
