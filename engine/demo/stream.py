"""One streamed chat request, read event by event as an ordinary HTTP client would."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 120.0
TIMING_KEYS = ("queue_ms", "link_ms", "prefill_ms", "decode_ms")


@dataclass(slots=True)
class ChatStream:
    """The state of one request; ``run`` fills it while another thread may look at it.

    arrivals: (monotonic seconds, tokens so far) of each event that brought tokens.
    timing: the server's own account of the request (TIMING_KEYS); empty if it gave none, None
    for a part that it does not know.
    """

    prompt: str
    max_tokens: int
    ignore_eos: bool = False
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    timing: dict[str, float | None] = field(default_factory=dict)
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that have arrived."""
        return self.arrivals[-1][1] if self.arrivals else 0

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.error is not None or self.finish_reason is not None

    @property
    def tokens_per_s(self) -> float:
        """Rate from the first event to the last, as the client saw it; 0 if there was one event."""
        if len(self.arrivals) < 2:
            return 0.0
        (first_s, first_tokens), (last_s, last_tokens) = self.arrivals[0], self.arrivals[-1]
        return (last_tokens - first_tokens) / max(last_s - first_s, 1e-9)

    def tokens_between(self, start_s: float, end_s: float) -> int:
        """Tokens that arrived in a span of monotonic time."""
        count = before = 0
        for when, total in self.arrivals:
            if start_s < when < end_s:
                count += total - before
            before = total
        return count

    def run(self, url: str, model: str) -> None:
        """Send the request and read the stream to its end; failures go to ``error``."""
        address = urlsplit(url)
        connection = http.client.HTTPConnection(
            address.hostname or "", address.port, timeout=TIMEOUT_S
        )
        try:
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(self._body(model)), HEADERS
            )
            response = connection.getresponse()
            if response.status != 200:
                self.error = (
                    f"HTTP {response.status}: {response.read(500).decode(errors='replace')}"
                )
                return
            for event in events(response):
                self._take(event)
            if self.finish_reason is None and self.error is None:
                self.error = "the stream ended without a finish reason"
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()

    def _body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": self.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }

    def _take(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        if "error" in event:
            self.error = str(event["error"].get("message", event["error"]))
            return
        usage = event.get("usage") or {}
        self.timing.update(usage.get("blinkbed") or {})
        for choice in event.get("choices", ()):
            content = choice.get("delta", {}).get("content")
            if content:
                self.text += content
                total = usage.get("completion_tokens", self.num_tokens + 1)
                self.arrivals.append((now, total))
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


HEADERS = {"content-type": "application/json", "x-blinkbed-timing": "1"}


def events(lines: Iterator[bytes] | http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream up to ``[DONE]``.

    Raises ValueError when the stream is cut before it.
    """
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)
    raise ValueError("the stream was cut before [DONE]")
