"""Logprobs over HTTP: every shown token's, none of what a stop cut off, streamed as unstreamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import RingConfig
from tests.http_client import CHAT, COMPLETIONS, Streamed, post, prompt_for, stream, whole_text
from tests.native_stack import start_native
from tests.server import Server, start_server

PATHS = (COMPLETIONS, CHAT)
STRINGS = ["DEF", "HI", "xABx", "ABC"]
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A scripted model that also has tokens of several bytes."""
    path = Path(tmp_path_factory.mktemp("strings"), "strings.json")
    path.write_text(json.dumps(STRINGS))
    with start_server(model=f"scripted:{path}", debug_scheduler=True) as started:
        yield started


def asking(path: str, answer: str, **fields: Any) -> dict[str, Any]:
    """A request for logprobs with one alternative."""
    wanted = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    return {**prompt_for(path, answer), "max_tokens": 60, **wanted, **fields}


def joined(path: str, streamed: Streamed, index: int = 0) -> dict[str, list[Any]]:
    """The fields of all chunks, as those of one choice."""
    parts = [choice["logprobs"] for choice in streamed.choices(index)]
    names = ("content",) if path == CHAT else LISTS
    return {name: [one for part in parts if part for one in part[name]] for name in names}


def tokens_of(path: str, logprobs: dict[str, Any]) -> list[str]:
    if path == CHAT:
        return [one["token"] for one in logprobs["content"]]
    tokens: list[str] = logprobs["tokens"]
    return tokens


def told(url: str, path: str, body: dict[str, Any]) -> tuple[str, list[str]]:
    """Text and tokens of the answer, which are the same whole and streamed."""
    response = post(url, path, body)
    assert response.status_code == 200, response.text
    logprobs = response.json()["choices"][0]["logprobs"]
    streamed = stream(url, path, body)
    assert streamed.text() == whole_text(response)
    chunks = joined(path, streamed)
    assert {name: logprobs[name] for name in chunks} == chunks
    return whole_text(response), tokens_of(path, logprobs)


def test_a_completion_tells_four_lists(server: Server) -> None:
    body = asking(COMPLETIONS, "aDEFb")
    assert post(server.url, COMPLETIONS, body).json()["choices"][0]["logprobs"] == {
        "tokens": ["a", "DEF", "b"],
        "token_logprobs": [0, 0, 0],
        "top_logprobs": [{"a": 0}, {"DEF": 0}, {"b": 0}],
        "text_offset": [0, 1, 4],
    }
    told(server.url, COMPLETIONS, body)
    alone = post(server.url, COMPLETIONS, {**body, "logprobs": 0}).json()["choices"][0]
    assert alone["logprobs"]["top_logprobs"] == [{"a": 0}, {"DEF": 0}, {"b": 0}]


def test_a_chat_tells_bytes_and_alternatives(server: Server) -> None:
    body = asking(CHAT, "aDEF")
    a, d = ({"token": text, "logprob": 0, "bytes": list(text.encode())} for text in ("a", "DEF"))
    choice = post(server.url, CHAT, body).json()["choices"][0]
    assert choice["logprobs"]["content"] == [{**a, "top_logprobs": [a]}, {**d, "top_logprobs": [d]}]
    told(server.url, CHAT, body)
    del body["top_logprobs"]
    without = post(server.url, CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert without == [{**a, "top_logprobs": []}, {**d, "top_logprobs": []}]


def test_chunks_tell_the_tokens_of_their_text(server: Server) -> None:
    for chunk in stream(server.url, COMPLETIONS, asking(COMPLETIONS, "aDEFbHI")).choices():
        tokens = chunk["logprobs"]["tokens"] if chunk["logprobs"] else []
        assert "".join(tokens) == chunk["text"]


@pytest.mark.parametrize("path", PATHS)
def test_who_does_not_ask_gets_null(server: Server, path: str) -> None:
    body = {**prompt_for(path, "ab"), "max_tokens": 9}
    assert post(server.url, path, body).json()["choices"][0]["logprobs"] is None
    assert all(chunk["logprobs"] is None for chunk in stream(server.url, path, body).choices())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("answer", "fields", "text", "tokens"),
    [
        ("DEFGHIJK", {"stop": "DEFGHIJ"}, "", []),
        ("12xABx34", {"stop": "AB"}, "12x", ["1", "2"]),  # xABx would tell what was cut
        ("12ABC34", {"stop": "BC3"}, "12A", ["1", "2"]),
        ("xyDEFG", {"stop": ["DEFGH", "yDEFX"]}, "xyDEFG", ["x", "y", "DEF", "G"]),
        ("xyDEFG", {"stop": "DEFGHIJ", "max_tokens": 3}, "xyDEF", ["x", "y", "DEF"]),
        ("12ABC34", {"stop": "BC", "include_stop_str_in_output": True}, "12ABC", ["1", "2", "ABC"]),
        ("12ABC34", {"stop": "AB", "include_stop_str_in_output": True}, "12AB", ["1", "2"]),
        ("abcdef", {"stop_token_ids": [ord("d")]}, "abc", ["a", "b", "c"]),
        (
            "abcdef",
            {"stop_token_ids": [ord("d")], "include_stop_str_in_output": True},
            "abcd",
            ["a", "b", "c", "d"],
        ),
        ("a\u00e9", {}, "a\u00e9", ["a", "bytes:\\xc3", "bytes:\\xa9"]),
        ("a\u00e9b", {"stop": "\u00e9"}, "a", ["a"]),  # nor half of what was cut
        ("a\u00e9b", {"max_tokens": 2}, "a\ufffd", ["a", "bytes:\\xc3"]),
        ("ab", {"ignore_eos": True, "max_tokens": 4}, "aba", ["a", "b", "token_id:257", "a"]),
    ],
)
def test_tokens_are_told_with_their_text_or_never(
    server: Server, path: str, answer: str, fields: dict[str, Any], text: str, tokens: list[str]
) -> None:
    assert told(server.url, path, asking(path, answer, **fields)) == (text, tokens)


def test_choices_have_their_own(server: Server) -> None:
    body = {"prompt": ["<|sep|>ab", "<|sep|>DEF"], "max_tokens": 9, "logprobs": 1}
    choices = post(server.url, COMPLETIONS, body).json()["choices"]
    assert [choice["logprobs"]["tokens"] for choice in choices] == [["a", "b"], ["DEF"]]
    streamed = stream(server.url, COMPLETIONS, body)
    for index, choice in enumerate(choices):
        assert joined(COMPLETIONS, streamed, index) == choice["logprobs"]


def test_a_small_token_ring_limits_how_many() -> None:
    with start_native(ring=RingConfig(num_slots=2, token_ring_entries=16)) as stack:
        refused = post(stack.url, COMPLETIONS, {"prompt": "<|sep|>ab", "logprobs": 16})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
        assert told(stack.url, COMPLETIONS, asking(COMPLETIONS, "ab", logprobs=15)) == (
            "ab",
            ["a", "b"],
        )


def check_likeliest(url: str) -> None:
    """A real distribution: sorted, its own token where greedy takes it, biased by nothing."""
    body = {
        "prompt": "The capital of France is",
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": 5,
        "ignore_eos": True,
    }
    plain = post(url, COMPLETIONS, body).json()["choices"][0]["logprobs"]
    assert [len(top) for top in plain["top_logprobs"]] == [5] * 6
    for token, logprob, top in zip(*(plain[name] for name in LISTS[:3]), strict=True):
        values = list(top.values())
        assert values == sorted(values, reverse=True)
        assert next(iter(top.items())) == (token, logprob)
        assert -10 < logprob < 0
    forced = post(url, COMPLETIONS, {**body, "logit_bias": {"260": 100}}).json()["choices"][0]
    forced = forced["logprobs"]
    top = plain["top_logprobs"][0]
    assert forced["top_logprobs"][0] == top
    assert forced["tokens"][0] == " the"
    assert forced["token_logprobs"][0] == top[" the"] < plain["token_logprobs"][0]
    streamed = stream(url, COMPLETIONS, body)
    assert joined(COMPLETIONS, streamed) == plain


def test_the_likeliest_on_the_persistent_path(smollm2_server: Server) -> None:
    check_likeliest(smollm2_server.url)


def test_logprobs_at_temperature_are_of_the_raw_distribution(smollm2_server: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 5,
        "temperature": 1.5,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 20,
    }
    content = post(smollm2_server.url, CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert content
    for one in content:
        assert len(one["top_logprobs"]) == 20
        by_token = {top["token"]: top["logprob"] for top in one["top_logprobs"]}
        assert by_token.get(one["token"], one["logprob"]) == one["logprob"]
