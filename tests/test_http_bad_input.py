"""Bad input over HTTP: a 400 that names the field, and the next request is served as ever."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.http_client import (
    CHAT,
    CLIENT,
    COMPLETIONS,
    canary,
    get,
    post,
    post_raw,
    prompt_for,
    stream,
    wait_idle,
    whole_text,
)
from tests.server import Server, start_server

MAX_CONTEXT = 256
POOL_TOKENS = 128
PATHS = (COMPLETIONS, CHAT)


@pytest.fixture(scope="module")
def small_server() -> Iterator[Server]:
    """A context of 256 tokens; every test must leave it idle and right."""
    with start_server(max_context=MAX_CONTEXT, ring_slots=8, debug_scheduler=True) as server:
        yield server


@pytest.fixture(autouse=True)
def _same_as_before(small_server: Server) -> Iterator[None]:
    yield
    canary(small_server.url)
    wait_idle(small_server.url)


def assert_refused(response: Any, param: str | None = None, code: str | None = None) -> None:
    """OpenAI's error shape with status 400."""
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompt", ["", [""], [], [[]], None, ["a", ""], [[1], []]])
def test_an_empty_prompt_is_refused(small_server: Server, prompt: Any, streamed: bool) -> None:
    body = {"prompt": prompt, "stream": streamed}
    assert_refused(post(small_server.url, COMPLETIONS, body), "prompt")


@pytest.mark.parametrize("messages", [None, [], "hi", [[]], [{}], [{"role": "user"}]])
def test_empty_messages_are_refused(small_server: Server, messages: Any) -> None:
    response = post(small_server.url, CHAT, {"messages": messages})
    assert_refused(response)
    assert response.json()["error"]["param"].startswith("messages")


@pytest.mark.parametrize("path", PATHS)
def test_a_missing_prompt_is_refused(small_server: Server, path: str) -> None:
    assert_refused(
        post(small_server.url, path, {"max_tokens": 3}), code="missing_required_parameter"
    )


@pytest.mark.parametrize("token", [-1, 259, 2**31, 2**32, 2**63, 2**64, "AI", 1.5, True, None])
def test_a_token_id_out_of_the_vocabulary_is_refused(small_server: Server, token: Any) -> None:
    url = small_server.url
    assert_refused(post(url, COMPLETIONS, {"prompt": [65, token]}), "prompt")
    assert_refused(post(url, COMPLETIONS, {"prompt": [[65], [token]]}), "prompt")
    body = {"prompt": "x", "stop_token_ids": [token]}
    assert_refused(post(url, COMPLETIONS, body), "stop_token_ids")
    for path in PATHS:
        biased = {**prompt_for(path, "x"), "logit_bias": {str(token): 1}}
        assert_refused(post(url, path, biased), "logit_bias")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400])
@pytest.mark.parametrize("name", ["temperature", "top_p", "max_tokens", "seed"])
def test_a_number_that_is_none_is_refused(small_server: Server, name: str, number: str) -> None:
    body = f'{{"prompt": "x", "{name}": {number}}}'.encode()
    assert_refused(post_raw(small_server.url, COMPLETIONS, body), name)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_bias_that_is_no_number_is_refused(small_server: Server, number: str) -> None:
    body = f'{{"prompt": "x", "logit_bias": {{"65": {number}}}}}'.encode()
    assert_refused(post_raw(small_server.url, COMPLETIONS, body), "logit_bias")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 50_000, b'{"prompt": "x",}', b"9" * 9000],
)
@pytest.mark.parametrize("path", PATHS)
def test_malformed_json_is_refused(small_server: Server, path: str, body: bytes) -> None:
    assert_refused(post_raw(small_server.url, path, body), code="invalid_json")


def test_a_body_of_many_megabytes_is_refused(small_server: Server) -> None:
    response = post_raw(small_server.url, COMPLETIONS, b'{"prompt": "' + b"x" * (5 << 20) + b'"}')
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def send_head(url: str, head: bytes) -> bytes:
    """What comes back for bytes in place of a request, until the server closes."""
    parts = urlsplit(url)
    answer = b""
    with socket.create_connection((parts.hostname, parts.port), timeout=5) as sock:
        try:
            sock.sendall(head)
            while part := sock.recv(65536):
                answer += part
        except (ConnectionResetError, BrokenPipeError):  # closed with bytes of ours unread
            pass
    return answer


@pytest.mark.parametrize(
    "head",
    [
        b"GET /livez HTTP/1.1\r\nx: ",
        b"GET /livez?",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ",
    ],
    ids=["header", "url", "trailer"],
)
def test_a_head_of_a_megabyte_is_refused_at_once(small_server: Server, head: bytes) -> None:
    started = time.monotonic()
    answer = send_head(small_server.url, head + b"x" * (1 << 20))
    assert get(small_server.url, "/livez").status_code == 200
    assert time.monotonic() - started < 1
    assert not answer or b" 431 " in answer.splitlines()[0]


def test_headers_just_over_the_limit_get_an_answer(small_server: Server) -> None:
    started = b"GET /livez HTTP/1.1\r\nx: "
    answer = send_head(small_server.url, started.ljust((64 << 10) + 1, b"x"))
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"headers_too_large" in answer
    response = CLIENT.get(small_server.url + "/livez", headers={"x": "x" * (60 << 10)})
    assert response.status_code == 200


@pytest.mark.parametrize("field", ["prompt", "n"])
def test_too_many_choices_are_refused_before_they_are_read(
    small_server: Server, field: str
) -> None:
    body = {"prompt": ["x", 5] * 100} if field == "prompt" else {"prompt": [[-1]], "n": 9}
    assert_refused(post(small_server.url, COMPLETIONS, body), field)


@pytest.mark.parametrize("key", ["--5", "\u00b2"])
@pytest.mark.parametrize("path", PATHS)
def test_a_bias_for_no_token_is_refused(small_server: Server, path: str, key: str) -> None:
    body = {**prompt_for(path, "x"), "logit_bias": {key: 1}}
    assert_refused(post(small_server.url, path, body), "logit_bias")


@pytest.mark.parametrize("path", PATHS)
def test_an_unknown_model_is_not_found(small_server: Server, path: str) -> None:
    response = post(small_server.url, path, {**prompt_for(path, "x"), "model": "gpt-9"})
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/responses", 404),
        ("GET", "/", 404),
        ("GET", "/v1/models/", 404),
    ],
)
def test_what_is_not_served_has_the_error_shape(
    small_server: Server, method: str, path: str, status: int
) -> None:
    response = httpx.request(method, small_server.url + path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("num_prompt_tokens", [MAX_CONTEXT, MAX_CONTEXT + 1, 5000, 200_000])
@pytest.mark.parametrize("as_text", [False, True])
def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(
    small_server: Server, num_prompt_tokens: int, as_text: bool
) -> None:
    url = small_server.url
    prompt: Any = "x" * num_prompt_tokens if as_text else [120] * num_prompt_tokens
    late: list[BaseException] = []
    mate = threading.Thread(target=run_canary, args=(url, late))
    mate.start()
    response = post(url, COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
    mate.join()
    assert not late
    assert_refused(response, "prompt", "context_length_exceeded")
    message = response.json()["error"]["message"]
    assert str(MAX_CONTEXT) in message
    if not as_text:
        assert str(num_prompt_tokens) in message
    assert response.elapsed.total_seconds() < 1


def run_canary(url: str, failures: list[BaseException]) -> None:
    try:
        canary(url, within_s=1.0)
    except BaseException as error:
        failures.append(error)


def test_a_request_that_fills_the_context_exactly_is_served(small_server: Server) -> None:
    url = small_server.url
    for num_prompt_tokens in (1, 100, MAX_CONTEXT - 1):
        room = MAX_CONTEXT - num_prompt_tokens
        body = {"prompt": [120] * num_prompt_tokens, "ignore_eos": True}
        response = post(url, COMPLETIONS, {**body, "max_tokens": room})
        assert response.status_code == 200
        assert response.json()["usage"]["total_tokens"] == MAX_CONTEXT
        assert response.json()["choices"][0]["finish_reason"] == "length"
        refused = post(url, COMPLETIONS, {**body, "max_tokens": room + 1})
        assert_refused(refused, "prompt", "context_length_exceeded")
        for number in (str(MAX_CONTEXT), str(MAX_CONTEXT + 1)):
            assert number in refused.json()["error"]["message"]


def test_a_chat_beyond_the_context_is_refused(small_server: Server) -> None:
    response = post(small_server.url, CHAT, prompt_for(CHAT, "x" * 1000))
    assert_refused(response, "messages", "context_length_exceeded")


def test_a_chat_without_a_limit_may_fill_the_context(small_server: Server) -> None:
    body = {**prompt_for(CHAT, "x"), "ignore_eos": True}
    result = stream(small_server.url, CHAT, {**body, "stream_options": {"include_usage": True}})
    assert result.usage["total_tokens"] == MAX_CONTEXT


def test_a_request_larger_than_the_kv_pool_is_refused() -> None:
    pages: dict[str, Any] = {"num_pages": POOL_TOKENS // 16, "page_size": 16}
    with start_server(max_context=MAX_CONTEXT, **pages) as server:
        model = get(server.url, "/v1/models").json()["data"][0]
        assert model["max_model_len"] == POOL_TOKENS
        for prompt in ("x" * (POOL_TOKENS + 1), "x" * POOL_TOKENS):
            response = post(server.url, COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
            assert_refused(response, "prompt", "context_length_exceeded")
        body = {"prompt": "x" * (POOL_TOKENS - 1), "max_tokens": 1}
        assert whole_text(post(server.url, COMPLETIONS, body)) == "x"
        canary(server.url)
