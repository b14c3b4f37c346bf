"""Short HTTP helpers for tests that look at a server from outside."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any


def get(url: str, timeout_s: float = 10.0) -> tuple[int, bytes]:
    """Status and body of a GET, whatever the status; (0, b"") without an answer."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except OSError:
        return 0, b""


def complete(url: str, timeout_s: float = 30.0, **body: object) -> dict[str, Any]:
    """The JSON answer of ``/v1/completions``; raises HTTPError for anything but 200."""
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


def scripted_canary(url: str, model: str = "scripted") -> str:
    """A request to the scripted model with a known answer: the text after its separator (258)."""
    prompt = [256, 258, *b"canary"]
    answer = complete(url, model=model, prompt=prompt, max_tokens=16, temperature=0)
    text: str = answer["choices"][0]["text"]
    return text
