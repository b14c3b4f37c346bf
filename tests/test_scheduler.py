"""What the compiled scheduler promises, one behaviour each, with a fake model."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.config import RingConfig, SchedulerConfig
from engine.protocol import EngineState, FinishReason
from engine.ring import RequestParams, RingFull
from engine.state import Command, RowFlag
from tests.scheduler_driver import EOS_ID, VOCAB_SIZE, Asked, Driver, answer


def make_driver(
    *, num_ports: int = 1, num_slots: int = 32, entries: int = 1024, **limits: Any
) -> Driver:
    defaults: dict[str, Any] = {
        "num_pages": 256,
        "page_size": 4,
        "max_running": 8,
        "max_step_tokens": 64,
        "max_context": 64,
        "debug": True,
    }
    ring = RingConfig(num_slots=num_slots, num_ports=num_ports, token_ring_entries=entries)
    return Driver(ring, SchedulerConfig(**defaults | limits))


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))] for _ in range(count)]


def sampled(prompt: list[int], seed: int) -> RequestParams:
    return RequestParams(
        max_tokens=64 - len(prompt), temperature=1.0, seed=seed, ignore_eos=seed % 3 > 0
    )


def serve_all(driver: Driver) -> list[Asked]:
    """24 requests with staggered arrivals, in the order of asking."""
    asked = []
    for number, prompt in enumerate(prompts(24)):
        asked.append(driver.ask(sampled(prompt, number), prompt))
        if number % 4 == 3:
            driver.step()
            driver.read()
    driver.run(4000)
    driver.check_answers()
    return asked


def num_preemptions(driver: Driver) -> int:
    driver.step()
    return driver.clients[0].snapshot().num_preemptions


def test_a_pool_too_small_changes_no_token() -> None:
    large, small = make_driver(), make_driver(num_pages=40)
    tokens = [asked.tokens for asked in serve_all(large)]
    assert [asked.tokens for asked in serve_all(small)] == tokens
    assert num_preemptions(large) == 0
    assert num_preemptions(small) > 5


def test_chunked_prefill_changes_no_token() -> None:
    whole = serve_all(make_driver(chunked_prefill=False))
    for budget in (8, 9, 17, 64):
        chunked = serve_all(make_driver(max_step_tokens=budget))
        assert [asked.tokens for asked in chunked] == [asked.tokens for asked in whole]


@pytest.mark.parametrize("num_mates", [0, 7, 31])
def test_batch_mates_change_neither_tokens_nor_draws(num_mates: int) -> None:
    prompt, params = [3, 1, 4], sampled([3, 1, 4], seed=1)
    driver = make_driver(num_pages=64, max_running=16)
    for mate, mate_prompt in enumerate(prompts(num_mates)):
        driver.ask(sampled(mate_prompt, 100 + mate), mate_prompt)
        driver.step()
    asked = driver.ask(params, prompt)
    seq = asked.ticket.slot
    driver.run(4000)
    assert asked.tokens == answer(params, prompt)[0]
    draws = {at: draw for (owner, at), draw in driver.uniforms.items() if owner == seq}
    expected = {at: driver.host._library.bb_philox_uniform(1, at) for at in range(3, 64)}
    assert draws == expected


def test_a_short_request_passes_a_long_prompt_in_chunks() -> None:
    driver = make_driver(max_context=1024, max_step_tokens=16, num_pages=512)
    talking = driver.ask(RequestParams(max_tokens=200, ignore_eos=True), [1])
    driver.step()
    driver.ask(RequestParams(max_tokens=1), [2] * 1000)
    for _ in range(60):
        driver.step()
        assert driver.rows[0]["seq"] == talking.ticket.slot
    driver.read()
    assert len(talking.tokens) == 60


def test_urgent_requests_are_admitted_first() -> None:
    driver = make_driver(max_running=1)
    order = []
    for priority in (0, 5, -1, 0, -1):
        params = RequestParams(max_tokens=2, ignore_eos=True, priority=priority)
        order.append(driver.ask(params, [1, 2]))
    driver.run(100)
    assert [driver.done.index(asked) for asked in order] == [2, 4, 0, 3, 1]


@pytest.mark.parametrize("min_tokens", [0, 1, 5])
def test_stop_ids_count_only_after_min_tokens(min_tokens: int) -> None:
    stops = tuple(token for token in range(30) if token != EOS_ID)
    driver = make_driver()
    for prompt in prompts(20):
        driver.ask(
            RequestParams(max_tokens=30, min_tokens=min_tokens, stop_token_ids=stops), prompt
        )
    driver.run(200)
    driver.check_answers()
    assert all(len(asked.tokens) > min_tokens for asked in driver.done)
    stopped = [asked for asked in driver.done if asked.reason == FinishReason.STOP]
    assert stopped
    for asked in stopped:
        assert not {*stops, EOS_ID} & {*asked.tokens[:min_tokens]}


def test_min_tokens_beyond_any_integer_means_never_stop() -> None:
    driver = make_driver()
    params = RequestParams(max_tokens=20, min_tokens=(1 << 32) - 1, stop_token_ids=(1, 2, 3))
    asked = driver.ask(params, [1])
    driver.step()
    assert driver.rows[0]["flags"] & RowFlag.SUPPRESS_STOP
    driver.run(100)
    assert (len(asked.tokens), asked.reason) == (20, FinishReason.LENGTH)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_max_tokens_is_exact(max_tokens: int) -> None:
    driver = make_driver()
    asked = driver.ask(RequestParams(max_tokens=max_tokens, ignore_eos=True), [1, 2, 3])
    driver.run(20)
    assert (len(asked.tokens), asked.reason) == (max_tokens, FinishReason.LENGTH)


def test_a_cancel_that_comes_with_its_request_is_not_lost() -> None:
    driver = make_driver()
    asked = driver.ask(RequestParams(max_tokens=60, ignore_eos=True), [1])
    driver.cancel(asked)
    driver.run(5)
    assert (asked.tokens, asked.reason) == ([], FinishReason.CANCELLED)


def test_a_cancel_ends_its_request_and_no_other() -> None:
    driver = make_driver(max_running=1)
    params = RequestParams(max_tokens=60, ignore_eos=True)
    active, queued, last = (driver.ask(params, [number]) for number in range(3))
    for _ in range(3):
        driver.step()
    driver.cancel(queued)
    driver.run(200)
    driver.check_answers()
    assert (queued.tokens, queued.reason) == ([], FinishReason.CANCELLED)
    assert len(active.tokens) == len(last.tokens) == 60


def test_a_late_cancel_does_not_touch_the_slots_next_request() -> None:
    driver = make_driver(num_slots=2)
    first = driver.ask(RequestParams(max_tokens=1), [1])
    driver.run(5)
    driver.cancel(first)
    second = driver.ask(RequestParams(max_tokens=9, ignore_eos=True), [1])
    driver.cancel(first)
    driver.run(50)
    assert second.ticket.slot == first.ticket.slot
    assert (len(second.tokens), second.reason) == (9, FinishReason.LENGTH)


def test_a_port_that_nobody_reads_does_not_stop_the_other() -> None:
    """Its requests pause, and give up place, pages and budget to those that can go on."""
    driver = make_driver(
        num_ports=2, num_slots=8, entries=16, num_pages=32, max_running=4, max_step_tokens=8
    )
    params = RequestParams(max_tokens=30, ignore_eos=True)
    deaf = [driver.ask(params, [1] * 30, port=0) for _ in range(8)]
    for _ in range(200):
        driver.step()
    assert len(driver.rows) == 0
    for number in range(20):
        asked = driver.ask(params, [number] * 20, port=1)
        for _ in range(60):
            driver.step()
            driver.read(port=1)
        assert asked.reason == FinishReason.LENGTH
    assert all(asked.reason == FinishReason.NONE for asked in deaf)
    driver.run(2000)
    driver.check_answers()


def test_terminals_of_a_full_ring_wait_for_room() -> None:
    driver = make_driver(num_slots=16, entries=16)
    params = RequestParams(max_tokens=40, ignore_eos=True)
    asked = [driver.ask(params, [1]) for _ in range(16)]
    for _ in range(100):
        driver.step()
    for request in asked:
        driver.cancel(request)
    for _ in range(100):
        driver.step()
    assert driver.clients[0].snapshot().state == EngineState.RUNNING
    driver.run(100)
    assert [request.reason for request in asked] == [FinishReason.CANCELLED] * 16


def test_a_model_without_a_valid_token_ends_that_request_only() -> None:
    driver = make_driver()
    params = RequestParams(max_tokens=9, ignore_eos=True)
    good, bad = driver.ask(params, [1]), driver.ask(params, [2])
    driver.step()
    driver.error_rows.add(bad.ticket.slot)
    driver.run(50)
    assert (bad.tokens, bad.reason) == ([], FinishReason.ERROR_MODEL)
    assert (len(good.tokens), good.reason) == (9, FinishReason.LENGTH)


def test_drain_finishes_what_is_there_and_refuses_the_rest() -> None:
    driver = make_driver()
    params = RequestParams(max_tokens=9, ignore_eos=True)
    early = driver.ask(params, [1])
    driver.step()
    driver.command(Command.DRAIN)
    late = driver.ask(params, [1])
    driver.run(50)
    driver.step()
    assert (len(early.tokens), early.reason) == (9, FinishReason.LENGTH)
    assert (late.tokens, late.reason) == ([], FinishReason.ERROR_SHUTDOWN)
    assert driver.engine_state == EngineState.STOPPED


def test_slots_are_reused_for_ever_and_full_is_not_the_end() -> None:
    """Thousands of requests through few slots; nothing leaks, nothing gets another's tokens."""
    driver = make_driver(num_slots=8, entries=16, num_pages=20, max_running=5)
    rng, refused = random.Random(3), 0
    for prompt in prompts(1500, seed=2):
        limit = rng.randint(1, min(12, 64 - len(prompt)))
        try:
            asked = driver.ask(RequestParams(max_tokens=limit, seed=limit), prompt)
        except RingFull:
            refused += 1
            driver.step()
            driver.read()
            continue
        if rng.random() < 0.2:
            driver.cancel(asked)
    driver.run(400)
    driver.check_answers()
    assert refused > 100
    assert len(driver.done) + refused == 1500
    assert driver.is_idle()
