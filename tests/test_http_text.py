"""Text over HTTP: lengths, stop strings, divided characters, usage; streamed as unstreamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http_client import CHAT, COMPLETIONS, get, post, prompt_for, stream, whole_text
from tests.server import Server, start_server

PATHS = (COMPLETIONS, CHAT)
STRINGS = ["DEF", "HI", "xABx", "ABC"]  # tokens of more than one byte, beside the single bytes
JOINED_EMOJI = "👩‍👩‍👧‍👦"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A scripted model that also has multi-byte tokens."""
    path = Path(tmp_path_factory.mktemp("strings"), "strings.json")
    path.write_text(json.dumps(STRINGS))
    with start_server(model=f"scripted:{path}", debug_scheduler=True) as started:
        yield started


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17])
def test_exactly_max_tokens_are_given(server: Server, path: str, max_tokens: int) -> None:
    body: dict[str, Any] = {
        **prompt_for(path, "abc"),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = post(server.url, path, body)
    assert response.json()["usage"]["completion_tokens"] == max_tokens
    assert len(response.json()["choices"][0]["token_ids"]) == max_tokens
    assert response.json()["choices"][0]["finish_reason"] == "length"
    result = stream(server.url, path, {**body, "stream_options": {"include_usage": True}})
    assert result.done
    assert result.token_ids() == response.json()["choices"][0]["token_ids"]
    assert result.usage == response.json()["usage"]
    assert result.finish_reasons() == ["length"]
    assert result.text() == whole_text(response)


@pytest.mark.parametrize("path", PATHS)
def test_the_end_of_sequence_stops_and_shows_nothing(server: Server, path: str) -> None:
    body = {**prompt_for(path, "hello"), "max_tokens": 50}
    response = post(server.url, path, body)
    assert whole_text(response) == "hello"
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert response.json()["usage"]["completion_tokens"] == 6
    assert stream(server.url, path, body).finish_reasons() == ["stop"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("answer", "stop", "shown"),
    [
        ("DEFGHIJK", "DEFGHIJ", ""),
        ("xyDEFGHIJK", ["DEFGHIJ"], "xy"),
        ("12xABx34", "AB", "12x"),
        ("12ABC34", ["ABC", "AB"], "12"),
        ("12ABC34", ["AB", "ABC"], "12"),
        ("12ABD34", ["ABC", "ABD"], "12"),
        ("a€b€c", "€c", "a€b"),
        ("aaab", "aab", "a"),
    ],
)
def test_a_stop_string_and_no_part_of_it_is_shown(
    server: Server, path: str, answer: str, stop: Any, shown: str
) -> None:
    body = {**prompt_for(path, answer), "stop": stop, "max_tokens": 40}
    response = post(server.url, path, body)
    assert whole_text(response) == shown
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    result = stream(server.url, path, body)
    assert result.text() == shown
    assert result.finish_reasons() == ["stop"]
    assert result.done


@pytest.mark.parametrize("path", PATHS)
def test_what_looked_like_a_stop_is_shown_when_it_is_none(server: Server, path: str) -> None:
    body = {**prompt_for(path, "xyDEFG"), "stop": ["DEFGH", "yDEFX"], "max_tokens": 40}
    result = stream(server.url, path, body)
    assert result.text() == "xyDEFG"
    assert whole_text(post(server.url, path, body)) == "xyDEFG"


def test_what_is_held_back_is_shown_at_the_length_limit(server: Server) -> None:
    body = {**prompt_for(COMPLETIONS, "xyDEFGHIJ"), "stop": "DEFGHIJ", "max_tokens": 4}
    result = stream(server.url, COMPLETIONS, body)
    assert result.text() == "xyDEFG"
    assert result.finish_reasons() == ["length"]


def test_the_stop_is_shown_where_that_is_asked_for(server: Server) -> None:
    body = {**prompt_for(COMPLETIONS, "abcdef"), "stop": "cd", "include_stop_str_in_output": True}
    assert stream(server.url, COMPLETIONS, body).text() == "abcd"


def test_a_stop_token_ends_the_answer(server: Server) -> None:
    body = {**prompt_for(COMPLETIONS, "abcdef"), "stop_token_ids": [ord("d")], "max_tokens": 20}
    response = post(server.url, COMPLETIONS, body)
    assert whole_text(response) == "abc"
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert response.json()["usage"]["completion_tokens"] == 4


def test_nothing_is_generated_after_a_stop_string(server: Server) -> None:
    body = {**prompt_for(COMPLETIONS, "abcdef"), "stop": "cd", "ignore_eos": True}
    response = post(server.url, COMPLETIONS, {**body, "max_tokens": 1500})
    assert response.json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "answer", ["é", "€", "😀", JOINED_EMOJI, f"aé€b😀c{JOINED_EMOJI}d", "ß" * 50]
)
def test_characters_of_several_bytes_stay_whole(server: Server, path: str, answer: str) -> None:
    body = {**prompt_for(path, answer), "max_tokens": 300}
    result = stream(server.url, path, body)
    assert result.text() == answer
    assert not any("\ufffd" in text for text in result.texts())
    assert whole_text(post(server.url, path, body)) == answer


def test_a_character_cut_by_the_limit_is_replaced_the_same_way_in_both(server: Server) -> None:
    body = {**prompt_for(COMPLETIONS, "a😀"), "max_tokens": 3}
    result = stream(server.url, COMPLETIONS, body)
    assert result.text() == whole_text(post(server.url, COMPLETIONS, body)) == "a\ufffd"


def test_the_first_chunk_has_text(server: Server) -> None:
    chat = stream(server.url, CHAT, {**prompt_for(CHAT, "hey"), "max_tokens": 9})
    first = chat.choices()[0]
    assert first["delta"] == {"role": "assistant", "content": "h"}
    assert all("role" not in chunk["delta"] for chunk in chat.choices()[1:])
    assert stream(server.url, COMPLETIONS, prompt_for(COMPLETIONS, "hey")).texts()[0] == "h"


def test_usage_comes_only_when_asked(server: Server) -> None:
    body = prompt_for(COMPLETIONS, "abc")
    assert not any("usage" in event for event in stream(server.url, COMPLETIONS, body).events)
    asked = {**body, "stream_options": {"include_usage": True}}
    *chunks, last = stream(server.url, COMPLETIONS, asked).events
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    running = {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last = stream(server.url, COMPLETIONS, running).events
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4]


def test_several_prompts_give_several_choices(server: Server) -> None:
    answers = ["one", "two", "three"]
    body = {"prompt": [f"<|sep|>{answer}" for answer in answers], "max_tokens": 10}
    response = post(server.url, COMPLETIONS, body)
    assert [whole_text(response, i) for i in range(3)] == answers
    result = stream(server.url, COMPLETIONS, body)
    assert [result.text(i) for i in range(3)] == answers
    assert [result.finish_reasons(i) for i in range(3)] == [["stop"]] * 3
    ids = [[258, *answer.encode()] for answer in answers]
    response = post(server.url, COMPLETIONS, {"prompt": ids, "max_tokens": 10})
    assert [whole_text(response, i) for i in range(3)] == answers


def test_ids_and_text_are_the_same_prompt(server: Server) -> None:
    asked = {"max_tokens": 8, "return_token_ids": True}
    by_text = post(server.url, COMPLETIONS, {"prompt": "a<|sep|>DEF", **asked}).json()["choices"][0]
    by_ids = {"prompt": by_text["prompt_token_ids"], **asked}
    assert post(server.url, COMPLETIONS, by_ids).json()["choices"][0]["text"] == by_text["text"]


def test_content_may_come_as_parts(server: Server) -> None:
    parts = [{"type": "text", "text": "hello"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 20}
    assert whole_text(post(server.url, CHAT, body)) == "hello"


def test_the_request_id_is_taken_and_returned(server: Server) -> None:
    body = prompt_for(COMPLETIONS, "abc")
    response = post(server.url, COMPLETIONS, body, x_request_id="my-id-7")
    assert response.headers["x-request-id"] == "my-id-7"
    assert response.json()["id"] == "cmpl-my-id-7"
    other = post(server.url, COMPLETIONS, body)
    assert other.headers["x-request-id"] != "my-id-7"


def test_timing_comes_with_the_usage_when_asked(server: Server) -> None:
    body = prompt_for(COMPLETIONS, "abc")
    timed = post(server.url, COMPLETIONS, body, x_blinkbed_timing="1").json()["usage"]
    names = {"queue_ms", "prefill_ms", "decode_ms", "link_ms", "preemptions"}
    assert set(timed["blinkbed"]) == names
    assert all(value >= 0 for value in timed["blinkbed"].values())
    assert "blinkbed" not in post(server.url, COMPLETIONS, body).json()["usage"]


def test_the_model_is_listed_with_its_limit(server: Server) -> None:
    listed = get(server.url, "/v1/models").json()
    assert listed["object"] == "list"
    assert listed["data"][0]["max_model_len"] == 2048
    named = {**prompt_for(COMPLETIONS, "abc"), "model": listed["data"][0]["id"]}
    assert whole_text(post(server.url, COMPLETIONS, named)) == "abc"
