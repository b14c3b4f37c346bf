"""What the device has produced for one HTTP request, between the ring and the response.

Everything here runs in the event loop's thread. The ring's side puts pieces and never waits; the
response's side takes them. A client that reads slowly makes only its own pieces wait and merge;
they are bounded by max_tokens.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from engine.smartnic.errors import ApiError
from engine.smartnic.logprobs import TokenLogprob


class Piece(NamedTuple):
    """What one token (or several, for a slow client) added to a choice, named by its number.

    finish_reason is set in the last piece of a choice. num_tokens counts the choice's tokens up to
    here. token_ids is empty unless the client asked for ids, logprobs unless it asked for those.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    num_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()


class Reply:
    """The pieces of all choices of one request.

    streamed: wake the reader for each piece; otherwise once, at the end. `sending` is true while
    the reader hands an event to the socket: a piece that arrives then finds the client behind.
    """

    __slots__ = ("_open", "_pieces", "_waiter", "abandoned", "error", "sending", "streamed")

    def __init__(self, num_choices: int, streamed: bool) -> None:
        self.streamed = streamed
        self.sending = False
        self.abandoned = False
        self.error: ApiError | None = None
        self._open = num_choices
        self._pieces: list[Piece] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """Nothing will be put any more."""
        return self._open == 0 or self.abandoned or self.error is not None

    @property
    def has_pieces(self) -> bool:
        """There is something to take."""
        return bool(self._pieces)

    def put(self, piece: Piece) -> None:
        pieces = self._pieces
        if self.sending and pieces and pieces[-1].choice == piece.choice:
            pieces[-1] = _merged(pieces[-1], piece)
        else:
            pieces.append(piece)
        if piece.finish_reason is not None:
            self._open -= 1
        if self._waiter is not None and (self.streamed or self._open == 0):
            self._wake()

    def fail(self, error: ApiError) -> None:
        """The request cannot be completed; pieces that were put before are still delivered."""
        if not self.ended:
            self.error = error
            self._wake()

    def abandon(self) -> None:
        """The client left."""
        self.abandoned = True
        self._wake()

    async def take(self) -> list[Piece]:
        """Pieces in order; waits for one, or for the end."""
        if not (self._pieces and self.streamed) and not self.ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pieces, self._pieces = self._pieces, []
        return pieces

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _merged(first: Piece, second: Piece) -> Piece:
    return Piece(
        first.choice,
        first.text + second.text,
        first.token_ids + second.token_ids,
        second.finish_reason,
        second.num_tokens,
        first.logprobs + second.logprobs,
    )
