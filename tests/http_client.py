"""What tests do over HTTP: whole and streamed requests, clients that leave, canaries, metrics."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.server import wait_until

TIMEOUT_S = 60.0
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
CLIENT = httpx.Client(
    verify=False,  # no TLS here, and loading certificates takes longer than most requests
    timeout=TIMEOUT_S,
    limits=httpx.Limits(max_keepalive_connections=0),
)
CANARY_TEXT = "canary: a fixed answer"


@dataclass
class Streamed:
    """A streamed response, read to its end."""

    status: int
    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        """The chunks of one choice."""
        return [c for event in self.events for c in event.get("choices", ()) if c["index"] == index]

    def texts(self, index: int = 0) -> list[str]:
        """The text of each chunk, of completions as of chats."""
        return [chunk_text(choice) for choice in self.choices(index)]

    def text(self, index: int = 0) -> str:
        return "".join(self.texts(index))

    def token_ids(self, index: int = 0) -> list[int]:
        """With return_token_ids."""
        return [token for choice in self.choices(index) for token in choice["token_ids"]]

    def finish_reasons(self, index: int = 0) -> list[str]:
        """All that were sent: exactly one is right."""
        return [c["finish_reason"] for c in self.choices(index) if c["finish_reason"] is not None]

    @property
    def usage(self) -> dict[str, Any]:
        """Of the last event that has one."""
        usage: dict[str, Any] = [e["usage"] for e in self.events if e.get("usage")][-1]
        return usage

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Error events."""
        return [event["error"] for event in self.events if "error" in event]


def chunk_text(choice: dict[str, Any]) -> str:
    """The text of a chunk's choice."""
    text: str = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return text


def whole_text(response: httpx.Response, index: int = 0) -> str:
    """The text of a choice of an unstreamed response."""
    choice = response.json()["choices"][index]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def post(url: str, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    """A whole response."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return CLIENT.post(url + path, json=body, headers=names)


def post_raw(url: str, path: str, body: bytes) -> httpx.Response:
    """A whole response to bytes that may be no JSON."""
    return CLIENT.post(url + path, content=body)


def get(url: str, path: str) -> httpx.Response:
    return CLIENT.get(url + path)


def stream(url: str, path: str, body: dict[str, Any]) -> Streamed:
    """A streamed response; each event must be UTF-8, nothing may follow [DONE]."""
    request = {**body, "stream": True}
    with CLIENT.stream("POST", url + path, json=request) as response:
        result = Streamed(response.status_code)
        raw = b"".join(response.iter_raw())
    if result.status == 200:
        for event in read_events(raw):
            assert not result.done, "an event after [DONE]"
            if event == "[DONE]":
                result.done = True
            else:
                result.events.append(json.loads(event))
    else:
        result.events.append(json.loads(raw))
    return result


def read_events(raw: bytes) -> list[str]:
    """The data of all events of a stream."""
    parts = raw.split(b"\n\n")
    assert parts[-1] == b"", "the stream ends inside an event"
    assert all(part.startswith(b"data: ") for part in parts[:-1])
    return [part.removeprefix(b"data: ").decode("utf-8") for part in parts[:-1]]


def prompt_for(path: str, answer: str) -> dict[str, Any]:
    """The fields that make the scripted model answer `answer`."""
    if path == CHAT:
        return {"messages": [{"role": "user", "content": answer}]}
    return {"prompt": f"say:<|sep|>{answer}"}


def canary(url: str, *, within_s: float = 2.0) -> None:
    """A fixed greedy request gives its known answer in time."""
    started = time.monotonic()
    response = post(
        url,
        COMPLETIONS,
        {**prompt_for(COMPLETIONS, CANARY_TEXT), "temperature": 0, "max_tokens": 64},
    )
    assert response.status_code == 200, response.text
    assert whole_text(response) == CANARY_TEXT
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert time.monotonic() - started < within_s


def metrics(url: str) -> dict[str, float]:
    """All samples, by name with labels."""
    lines = [line for line in get(url, "/metrics").text.splitlines() if line[:1] not in ("#", "")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def wait_idle(url: str, timeout_s: float = 2.0) -> dict[str, float]:
    """The idle invariant: nothing runs or waits, every KV page and every slot is free."""

    def idle() -> dict[str, float] | None:
        m = metrics(url)
        busy = m["blinkbed_num_requests_running"] + m["blinkbed_num_requests_waiting"]
        pages = m["blinkbed_kv_pages_total"] - m["blinkbed_kv_pages_free"]
        return None if busy or pages or m["blinkbed_ring_slots_used"] else m

    return wait_until(idle, timeout_s, "nothing runs, all pages and slots are free")


@contextmanager
def raw_request(url: str, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A socket on which the request was sent; it is closed at the end, whatever came back."""
    parts = urlsplit(url)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((parts.hostname, parts.port), timeout=TIMEOUT_S) as sock:
        sock.sendall(head.encode() + content)
        yield sock


def receive_until(sock: socket.socket, enough: Callable[[bytearray], bool]) -> bytes:
    """Read from a socket until the condition holds for all that came."""
    data = bytearray()
    while not enough(data):
        part = sock.recv(65536)
        assert part, f"the connection ended early: {bytes(data[-500:])!r}"
        data += part
    return bytes(data)
