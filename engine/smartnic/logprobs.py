"""Logarithms of probabilities as OpenAI's two endpoints show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

LEAST = -9999.0
"""Stands for minus infinity, which JSON lacks."""


class TokenLogprob(NamedTuple):
    """A token of the answer: its logprob in the raw distribution, before biases and temperature.

    alternatives: (token, logprob) of the likeliest tokens in its place, best first, as many as were
    asked for. text_offset: the character of the choice's text at which it begins.
    """

    token: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...]
    text_offset: int


def token_bytes(token: int, table: Sequence[bytes]) -> bytes:
    """Bytes of a token; special tokens have none."""
    return table[token] if 0 <= token < len(table) else b""


def token_text(token: int, table: Sequence[bytes]) -> str:
    r"""A token as a string: half a character becomes ``bytes:\xe2\x80``, as OpenAI writes it; a
    token without bytes ``token_id:7``, so that no two are the same.
    """
    data = token_bytes(token, table)
    if not data:
        return f"token_id:{token}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def completion_logprobs(tokens: Sequence[TokenLogprob], table: Sequence[bytes]) -> dict[str, Any]:
    """The field `logprobs` of a completion's choice. The sampled token is in `top_logprobs` even if
    it is none of the likeliest: there may be one more than was asked for.
    """
    tops = []
    for one in tokens:
        top = {token_text(token, table): max(value, LEAST) for token, value in one.alternatives}
        top.setdefault(token_text(one.token, table), max(one.logprob, LEAST))
        tops.append(top)
    return {
        "tokens": [token_text(one.token, table) for one in tokens],
        "token_logprobs": [max(one.logprob, LEAST) for one in tokens],
        "top_logprobs": tops,
        "text_offset": [one.text_offset for one in tokens],
    }


def chat_logprobs(tokens: Sequence[TokenLogprob], table: Sequence[bytes]) -> dict[str, Any]:
    """The field `logprobs` of a chat's choice."""

    def describe(token: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(token, table)
        return {
            "token": token_text(token, table),
            "logprob": max(logprob, LEAST),
            "bytes": list(data) if data else None,
        }

    content = [
        {
            **describe(one.token, one.logprob),
            "top_logprobs": [describe(*alternative) for alternative in one.alternatives],
        }
        for one in tokens
    ]
    return {"content": content, "refusal": None}
