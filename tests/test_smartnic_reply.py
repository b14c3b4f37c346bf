"""Pieces between the ring and a response: order, waking, merging for slow clients, ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from engine.smartnic.errors import engine_lost
from engine.smartnic.logprobs import TokenLogprob, chat_logprobs, completion_logprobs
from engine.smartnic.reply import Piece, Reply
from engine.smartnic.streaming import PieceEvents


def piece(text: str, choice: int = 0, finish: str | None = None, count: int = 1) -> Piece:
    return Piece(choice, text, (), finish, count)


def test_a_reader_wakes_for_each_piece_of_a_stream() -> None:
    async def run() -> list[list[Piece]]:
        reply = Reply(1, streamed=True)
        loop = asyncio.get_running_loop()
        loop.call_soon(reply.put, piece("a"))
        first = await reply.take()
        reply.put(piece("b"))
        reply.put(piece("c", finish="stop"))
        return [first, await reply.take()]

    first, rest = asyncio.run(run())
    assert [p.text for p in first] == ["a"]
    assert [p.text for p in rest] == ["b", "c"]


def test_a_whole_response_wakes_its_reader_once_at_the_end() -> None:
    async def run() -> list[Piece]:
        reply = Reply(2, streamed=False)
        reader = asyncio.ensure_future(reply.take())
        for part in (piece("a"), piece("b", 1, "length"), piece("c")):
            reply.put(part)
            await asyncio.sleep(0)
            assert not reader.done()
        reply.put(piece("", finish="stop"))
        return await reader

    assert [p.text for p in asyncio.run(run())] == ["a", "b", "c", ""]


def test_pieces_merge_only_while_the_client_is_behind() -> None:
    reply = Reply(2, streamed=True)
    reply.put(piece("a"))
    reply.put(piece("b"))
    reply.sending = True
    reply.put(piece("c", count=3))
    reply.put(piece("x", choice=1))
    reply.put(piece("y", choice=1, finish="stop", count=2))
    pieces = asyncio.run(reply.take())
    assert [(p.choice, p.text, p.num_tokens) for p in pieces] == [
        (0, "a", 1),
        (0, "bc", 3),
        (1, "xy", 2),
    ]
    assert pieces[-1].finish_reason == "stop"


def test_an_error_wakes_the_reader_after_what_came_before() -> None:
    async def run() -> tuple[list[Piece], Reply]:
        reply = Reply(1, streamed=True)
        reply.put(piece("a"))
        reply.fail(engine_lost("gone"))
        return await reply.take(), reply

    pieces, reply = asyncio.run(run())
    assert [p.text for p in pieces] == ["a"]
    assert reply.ended
    assert reply.error is not None


def test_a_slow_clients_pieces_keep_their_logprobs_in_order() -> None:
    async def run() -> list[Piece]:
        reply = Reply(1, streamed=True)
        reply.sending = True
        for token, text in enumerate("abc"):
            one = TokenLogprob(token, -0.5 * token, ((token, -0.5 * token),), token)
            reply.put(piece(text)._replace(logprobs=(one,)))
        return await reply.take()

    (merged,) = asyncio.run(run())
    assert merged.text == "abc"
    assert [one.token for one in merged.logprobs] == [0, 1, 2]
    events = PieceEvents(
        {"id": "x"},
        chat=True,
        logprobs=lambda tokens: chat_logprobs(tokens, [b"a", b"b", b"\xff"]),
    )
    choice = rendered(events.render(merged))["choices"][0]
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == ["a", "b", "bytes:\\xff"]
    assert content[2]["bytes"] == [255]
    assert content[1]["top_logprobs"] == [{"token": "b", "logprob": -0.5, "bytes": [98]}]


def test_what_json_lacks_is_told_as_the_least() -> None:
    never = TokenLogprob(1, float("-inf"), ((0, 0.0), (2, float("-inf"))), 0)
    told = completion_logprobs([never], [b"a", b"b", b""])
    assert told["token_logprobs"] == [-9999.0]
    assert told["top_logprobs"] == [{"a": 0.0, "token_id:2": -9999.0, "b": -9999.0}]
    json.dumps(told, allow_nan=False)


def rendered(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    value: dict[str, Any] = json.loads(event[len(b"data: ") :])
    return value


def test_an_event_is_json_whatever_the_text() -> None:
    events = PieceEvents({"id": "x", "model": 'a"b'}, chat=True, null_usage=True)
    for text in ('"\\\n\r\t\0', "€😀\u2028", "</script>", "\x7f\ufffd"):
        assert rendered(events.render(piece(text)))["choices"][0]["delta"]["content"] == text


def test_running_usage_and_ids_are_in_every_chunk() -> None:
    events = PieceEvents(
        {"id": "x"},
        chat=False,
        usage=lambda p: {"completion_tokens": p.num_tokens},
        prompt_ids=[[1, 2]],
    )
    first = rendered(events.render(Piece(0, "a", (5,), None, 1)))
    second = rendered(events.render(Piece(0, "b", (6, 7), "stop", 3)))
    assert first["choices"][0]["prompt_token_ids"] == [1, 2]
    assert "prompt_token_ids" not in second["choices"][0]
    assert second["choices"][0]["token_ids"] == [6, 7]
    assert second["choices"][0]["finish_reason"] == "stop"
    assert [e["usage"]["completion_tokens"] for e in (first, second)] == [1, 3]
