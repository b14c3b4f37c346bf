"""Many requests at once: every token in its own stream, whatever batch, slot or page it shared."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.http_client import (
    COMPLETIONS,
    canary,
    metrics,
    post,
    raw_request,
    receive_until,
    stream,
    wait_idle,
)
from tests.server import Server, start_server

NUM_STREAMS = 64
ROUNDS = 4
DEADLINE_S = 120.0


def marked(number: int, round_number: int) -> str:
    """An answer that no other stream has."""
    return f"[{number}/{round_number}]" * 12


def run_stream(url: str, number: int) -> int:
    """Own markers, again and again; some are left in the middle. Returns how many ended whole."""
    chooser = random.Random(number)
    whole = 0
    for round_number in range(ROUNDS):
        answer = marked(number, round_number)
        body: dict[str, Any] = {"prompt": f"<|sep|>{answer}", "max_tokens": 300}
        if chooser.random() < 0.3:
            abort_after(url, body, chooser.randint(1, 5))
            continue
        text = retry_until_served(url, body)
        assert text == answer
        whole += 1
    return whole


def retry_until_served(url: str, body: dict[str, Any]) -> str:
    """The streamed text; 503 is retried, as clients do."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        result = stream(url, COMPLETIONS, body)
        if result.status == 200:
            assert result.finish_reasons() == ["stop"]
            assert result.done
            return result.text()
        assert result.status == 503, result.events
        assert time.monotonic() < deadline
        time.sleep(0.01)


def abort_after(url: str, body: dict[str, Any], num_events: int) -> None:
    """Leave after some events, if any come."""
    with raw_request(url, COMPLETIONS, {**body, "stream": True}) as sock:
        receive_until(sock, lambda data: data.count(b"data: ") >= num_events or b" 503 " in data)


def test_slots_are_reused_without_mixing_streams() -> None:
    with start_server(ring_slots=8, max_running=8, debug_scheduler=True) as server:
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            counts = list(pool.map(lambda n: run_stream(server.url, n), range(NUM_STREAMS)))
        assert sum(counts) > NUM_STREAMS
        wait_idle(server.url)
        canary(server.url)


def test_preemption_neither_loses_nor_doubles_a_token() -> None:
    """Eight answers that need twice the pages that there are."""
    answers = [f"<{number}>" for number in range(8)]
    pages: dict[str, Any] = {"num_pages": 750, "page_size": 16, "max_context": 4096}
    with start_server(ring_slots=8, max_running=8, debug_scheduler=True, **pages) as server:
        prompts = [f"<|sep|>{answer}" for answer in answers]
        body = {"prompt": prompts, "max_tokens": 3000, "ignore_eos": True}
        result = stream(server.url, COMPLETIONS, {**body, "return_token_ids": True})
        for index, answer in enumerate(answers):
            assert result.token_ids(index) == ([*answer.encode(), 257] * 750)[:3000]
            assert result.text(index) == answer * 750
        wait_idle(server.url)
        assert metrics(server.url)["blinkbed_num_preemptions_total"] > 0


def test_a_seeded_request_does_not_depend_on_its_batch_mates(smollm2_server: Server) -> None:
    url = smollm2_server.url
    body: dict[str, Any] = {
        "prompt": "Once upon a time there was",
        "max_tokens": 12,
        "temperature": 1.0,
        "top_p": 0.95,
        "seed": 1234,
        "return_token_ids": True,
        "ignore_eos": True,
    }

    def ids_among(num_mates: int) -> list[int]:
        mates = [
            {"prompt": f"Mate number {i} says", "max_tokens": 16, "temperature": 1.0}
            for i in range(num_mates)
        ]
        with ThreadPoolExecutor(num_mates + 1) as pool:
            others = [pool.submit(post, url, COMPLETIONS, mate) for mate in mates]
            mine = pool.submit(post, url, COMPLETIONS, body).result()
            assert all(other.result().status_code == 200 for other in others)
        ids: list[int] = mine.json()["choices"][0]["token_ids"]
        return ids

    alone = ids_among(0)
    assert len(alone) == 12
    assert ids_among(7) == alone
    assert ids_among(31) == alone
    other_seed = post(url, COMPLETIONS, {**body, "seed": 99}).json()["choices"][0]["token_ids"]
    assert other_seed != alone
