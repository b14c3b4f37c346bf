"""A Locust user that streams chat answers; TTFT and TPOT are events of their own.

    locust -f loadtests/locustfile.py --headless --host http://127.0.0.1:8000 -u 16 -t 30s

TTFT: from sending the request to the first event with text in it; neither the headers nor a
chunk that only names the role count. TPOT: from the first text to the last, over the tokens
between them. The request's own response time is the whole answer. An error event, a stream
without finish reason, and a cut stream are failures and give no TPOT.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from locust import FastHttpUser, constant, events, task

PATH = "/v1/chat/completions"
PROMPTS = (
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "What is the difference between a virus and a bacterium?",
    "Give me a recipe for vegetable soup.",
)


class StreamError(Exception):
    """The stream did not bring a complete answer."""


@dataclass(slots=True)
class Samples:
    """Exact values of this process; Locust's own statistics round to whole milliseconds."""

    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    num_requests: int = 0
    num_failures: int = 0
    num_tokens: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    first_s: float = 0.0
    last_s: float = 0.0


SAMPLES = Samples()


@dataclass(slots=True)
class Answer:
    """What one stream has brought so far; times in seconds of ``perf_counter``."""

    first_text_s: float | None = None
    last_text_s: float = 0.0
    num_text_events: int = 0
    num_tokens: int | None = None
    finish_reason: str | None = None

    def take(self, event: dict[str, Any], now_s: float) -> None:
        """Account for one event; raises StreamError for an error event."""
        if "error" in event:
            raise StreamError(f"error event: {event['error']}")
        usage = event.get("usage")
        if usage:
            self.num_tokens = usage["completion_tokens"]
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if delta.get("content"):
                self.num_text_events += 1
                self.last_text_s = now_s
                if self.first_text_s is None:
                    self.first_text_s = now_s
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    @property
    def total_tokens(self) -> int:
        """Tokens by the server's count, else the number of events with text."""
        return self.num_text_events if self.num_tokens is None else self.num_tokens


def stream_events(response: Any) -> Iterator[dict[str, Any]]:
    """The JSON events of a response up to ``[DONE]``; raises StreamError when it is cut."""
    while True:
        line = response.readline(b"\n")
        if not line:
            raise StreamError("the stream was cut before [DONE]")
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)


class ChatUser(FastHttpUser):  # type: ignore[misc]
    """Asks one streamed question after the other."""

    wait_time = constant(0)
    network_timeout = 120.0
    connection_timeout = 10.0

    def on_start(self) -> None:
        """The model's name comes from the server."""
        options = self.environment.parsed_options
        self.max_tokens: int = options.max_tokens
        self.num_asked = 0
        response = self.client.get("/v1/models", name="/v1/models")
        self.model: str = response.json()["data"][0]["id"]

    @task  # type: ignore[untyped-decorator]
    def chat(self) -> None:
        """One question, read to the end of its answer."""
        self.num_asked += 1
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": PROMPTS[self.num_asked % len(PROMPTS)]}],
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = Answer()
        started_s = time.perf_counter()
        with self.client.post(
            PATH,
            json=body,
            stream=True,
            catch_response=True,
            headers={"Accept-Encoding": "identity"},
        ) as response:
            problem = self._read(response, answer)
            ended_s = time.perf_counter()
            response.request_meta["response_time"] = (ended_s - started_s) * 1000
            if problem is None:
                response.success()
            else:
                response.failure(problem)
        self._account(answer, started_s, ended_s, problem)

    def _read(self, response: Any, answer: Answer) -> str | None:
        if response.status_code != 200:
            return f"HTTP {response.status_code} {response.error or ''}".strip()
        try:
            for event in stream_events(response.stream):
                answer.take(event, time.perf_counter())
        except StreamError as error:
            return str(error)
        except Exception as error:  # whatever the connection or the parser raises is a cut stream
            return f"the stream was cut: {type(error).__name__}: {error}"
        if answer.finish_reason is None:
            return "the stream ended without a finish reason"
        if answer.first_text_s is None:
            return "the answer had no text"
        return None

    def _account(
        self, answer: Answer, started_s: float, ended_s: float, problem: str | None
    ) -> None:
        SAMPLES.first_s = SAMPLES.first_s or started_s
        SAMPLES.last_s = max(SAMPLES.last_s, ended_s)
        SAMPLES.num_requests += 1
        if problem is not None:
            SAMPLES.num_failures += 1
            SAMPLES.failures[problem] = SAMPLES.failures.get(problem, 0) + 1
        if answer.first_text_s is None:
            return
        SAMPLES.num_tokens += answer.total_tokens
        self._fire("TTFT", (answer.first_text_s - started_s) * 1000, SAMPLES.ttft_ms)
        if problem is None and answer.total_tokens > 1:
            span_s = answer.last_text_s - answer.first_text_s
            self._fire("TPOT", span_s * 1000 / (answer.total_tokens - 1), SAMPLES.tpot_ms)

    def _fire(self, kind: str, value_ms: float, samples: list[float]) -> None:
        samples.append(value_ms)
        self.environment.events.request.fire(
            request_type=kind,
            name=PATH,
            response_time=value_ms,
            response_length=0,
            exception=None,
            context={},
        )


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def add_arguments(parser: ArgumentParser) -> None:
    """What the load is made of, and where the exact values go."""
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--samples", default="", help="file for the exact values, as JSON")


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def write_samples(environment: Any, **_: Any) -> None:
    """Write the exact values when Locust ends."""
    path = environment.parsed_options.samples
    if path:
        values = {name: getattr(SAMPLES, name) for name in Samples.__slots__}
        Path(path).write_text(json.dumps(values))
