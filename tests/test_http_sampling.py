"""Biases and suppressed stop ids over HTTP, on a model with a real distribution."""

from __future__ import annotations

from typing import Any

from tests.http_client import CHAT, COMPLETIONS, post
from tests.server import Server

PROMPT = {"prompt": "The capital of France is", "temperature": 0, "return_token_ids": True}


def ids_of(url: str, **fields: Any) -> list[int]:
    response = post(url, COMPLETIONS, {**PROMPT, "max_tokens": 6, "ignore_eos": True, **fields})
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


def check_adjustments(url: str) -> None:
    """A bias forces and forbids, own stop ids wait for min_tokens, and neither stays behind."""
    plain = ids_of(url)
    assert ids_of(url, logit_bias={"260": 100}) == [260] * 6
    without = ids_of(url, logit_bias={str(token): -100 for token in set(plain)})
    assert not set(without) & set(plain)
    assert ids_of(url, stop_token_ids=plain[:1]) == plain[:1]
    late = ids_of(url, stop_token_ids=plain[:1], min_tokens=4)
    assert len(late) == 6 or late[-1] == plain[0]
    assert len(late) > 4
    assert plain[0] not in late[:4]
    assert ids_of(url) == plain


def test_adjustments_on_the_persistent_path(smollm2_server: Server) -> None:
    check_adjustments(smollm2_server.url)


def test_a_chat_takes_a_bias(smollm2_server: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 0,
        "max_tokens": 3,
        "logit_bias": {"260": 100},
        "return_token_ids": True,
        "ignore_eos": True,
    }
    response = post(smollm2_server.url, CHAT, body)
    assert response.json()["choices"][0]["token_ids"] == [260] * 3
