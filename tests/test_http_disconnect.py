"""Clients that leave: what they asked for stops, what others asked for goes on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine.config import RingConfig, SchedulerConfig
from tests.http_client import (
    CHAT,
    COMPLETIONS,
    Streamed,
    canary,
    metrics,
    prompt_for,
    raw_request,
    receive_until,
    stream,
    wait_idle,
)
from tests.native_stack import NativeStack, start_native
from tests.server import Server, start_server, wait_until

ENDLESS = {"ignore_eos": True, "max_tokens": 1_000_000}
PATHS = (COMPLETIONS, CHAT)
LARGE: dict[str, Any] = {"max_context": 1 << 20, "num_pages": 1 << 17}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A context so long that an endless answer stays endless."""
    with start_server(ring_slots=8, max_running=8, **LARGE) as started:
        yield started


@pytest.fixture(scope="module")
def narrow_server() -> Iterator[NativeStack]:
    """One running slot, so that others wait, and one token a step, so that prompts take long."""
    scheduler = SchedulerConfig(max_running=1, max_step_tokens=1, **LARGE)
    ring = RingConfig(num_slots=8)
    with start_native(step_us=100, ring=ring, scheduler=scheduler) as started:
        yield started


def num_running(url: str) -> float:
    return metrics(url)["blinkbed_num_requests_running"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 4])
def test_leaving_after_three_chunks_stops_all_choices(server: Server, path: str, n: int) -> None:
    body = {**prompt_for(path, "abc"), **ENDLESS, "n": n, "stream": True}
    with raw_request(server.url, path, body) as sock:
        receive_until(sock, lambda data: data.count(b"data: ") >= 3)
        assert metrics(server.url)["blinkbed_ring_slots_used"] == n
    wait_idle(server.url)
    generated = metrics(server.url)["blinkbed_generation_tokens_total"]
    canary(server.url)
    wait_idle(server.url)
    assert metrics(server.url)["blinkbed_generation_tokens_total"] - generated < 100


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 4])
def test_leaving_an_unstreamed_request_stops_it(server: Server, path: str, n: int) -> None:
    body = {**prompt_for(path, "abc"), **ENDLESS, "n": n}
    with raw_request(server.url, path, body):
        wait_until(lambda: num_running(server.url) == n, 5, "all choices run")
    wait_idle(server.url)


@pytest.mark.parametrize("streamed", [False, True])
def test_leaving_at_once_or_during_prefill_stops_the_request(
    narrow_server: NativeStack, streamed: bool
) -> None:
    url = narrow_server.url
    body: dict[str, Any] = {"prompt": "x" * 100_000, "max_tokens": 5, "stream": streamed}
    with raw_request(url, COMPLETIONS, body):
        pass
    with raw_request(url, COMPLETIONS, body):
        wait_until(lambda: num_running(url) == 1, 5, "the prompt is being computed")
    wait_idle(url)
    canary(url)


def test_a_queued_client_that_leaves_harms_nobody(narrow_server: NativeStack) -> None:
    url = narrow_server.url
    active_answer = "active " * 40
    results: dict[str, Streamed] = {}

    def run(name: str, answer: str) -> None:
        body = {**prompt_for(COMPLETIONS, answer), "max_tokens": 5000}
        results[name] = stream(url, COMPLETIONS, body)

    with contextlib.ExitStack() as sockets:
        holder = {**prompt_for(COMPLETIONS, "hold"), **ENDLESS, "stream": True}
        first = contextlib.ExitStack()
        sock = first.enter_context(raw_request(url, COMPLETIONS, holder))
        receive_until(sock, lambda data: data.count(b"data: ") >= 1)
        active = threading.Thread(target=run, args=("active", active_answer))
        active.start()
        wait_for_waiting(url, 1)
        departed = {"prompt": "d" * 100_000, "max_tokens": 10}
        with raw_request(url, COMPLETIONS, departed):
            wait_for_waiting(url, 2)
        wait_for_waiting(url, 1)
        following = threading.Thread(target=run, args=("next", "the next one"))
        following.start()
        wait_for_waiting(url, 2)
        steps_before = metrics(url)["blinkbed_engine_steps_total"]
        first.close()  # the active one starts
        sockets.callback(first.close)
        active.join()
        following.join()
    assert results["active"].text() == active_answer
    assert results["active"].finish_reasons() == ["stop"]
    assert results["next"].text() == "the next one"
    wait_idle(url)
    assert metrics(url)["blinkbed_engine_steps_total"] - steps_before < 20_000


def wait_for_waiting(url: str, count: int) -> None:
    wait_until(
        lambda: metrics(url)["blinkbed_num_requests_waiting"] == count, 5, f"{count} waiting"
    )
