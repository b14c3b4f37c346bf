"""Alternatives in the token ring: each token's own, before it, once, and never more than fit."""

from __future__ import annotations

import pytest

from engine.config import RingConfig, SchedulerConfig
from engine.protocol import EntryKind, FinishReason
from engine.ring import RequestParams
from tests.hostile_ring import make_driver as make_hostile_driver
from tests.hostile_ring import outcome, post
from tests.scheduler_driver import Driver, alternatives_of, answer

PROMPT = (3, 1, 4)
ENTRIES = 16


def make_driver(*, num_pages: int = 256) -> Driver:
    scheduler = SchedulerConfig(
        num_pages=num_pages,
        page_size=4,
        max_running=4,
        max_step_tokens=64,
        max_context=64,
        debug=True,
    )
    ring = RingConfig(num_slots=4, token_ring_entries=ENTRIES)
    return Driver(ring, scheduler, with_twin=True)


def wanting(num_logprobs: int, seed: int = 0) -> RequestParams:
    return RequestParams(max_tokens=12, ignore_eos=True, num_logprobs=num_logprobs, seed=seed)


def test_each_token_comes_behind_its_alternatives() -> None:
    driver = make_driver()
    asked = driver.ask(wanting(3), PROMPT)
    driver.run(100)
    assert asked.tokens == answer(asked.params, PROMPT)[0]
    assert asked.alternatives[:-1] == alternatives_of(asked.params, PROMPT)
    assert max(map(len, asked.alternatives)) == 3
    assert driver.clients[0].snapshot().generation_tokens == len(asked.tokens) == 12


def test_num_logprobs_0_brings_the_token_alone() -> None:
    driver = make_driver()
    asked = driver.ask(wanting(0), PROMPT)
    driver.run(100)
    assert asked.alternatives == [[]] * 13


def test_a_token_waits_until_it_fits_with_all_its_alternatives() -> None:
    driver = make_driver()
    asked = [driver.ask(wanting(9), PROMPT), driver.ask(wanting(-1), (*PROMPT, 5))]
    for _ in range(30):
        driver.step()  # nobody reads
    tail = driver.entry(0, 0)
    assert tail.kind in (EntryKind.TOKEN, EntryKind.ALTERNATIVE)
    port = driver.memory.arrays["ports"][0]
    assert ENTRIES - 10 < port["token_tail"] <= ENTRIES
    assert driver.clients[0].snapshot().ring_stalls > 0
    driver.run(400)
    driver.check_answers()
    assert [one.reason for one in asked] == [FinishReason.LENGTH] * 2


@pytest.mark.parametrize("num_logprobs", [4, 15])
def test_one_entry_read_at_a_time_is_enough(num_logprobs: int) -> None:
    """The widest token that a ring holds beside narrow ones, and a reader that is always behind."""
    driver = make_driver()
    for index in range(3):
        driver.ask(wanting(num_logprobs if index == 1 else -1, index), (*PROMPT, index))
    for _ in range(3000):
        driver.read(0, limit=1)
        driver.step()
        if not driver.live[0]:
            break
    assert len(driver.done) == 3
    driver.check_answers()


def test_preemption_publishes_no_alternative_again() -> None:
    driver = make_driver(num_pages=16)
    for index in range(4):
        prompt = [index + 1] * 20
        driver.ask(RequestParams(max_tokens=44, ignore_eos=True, num_logprobs=2), prompt)
    driver.run(2000)
    driver.check_answers()
    assert driver.clients[0].snapshot().num_preemptions > 0
    assert all(len(asked.alternatives) == 45 for asked in driver.done)


def test_what_the_ring_could_never_hold_is_refused() -> None:
    for num_logprobs, reason in ((15, FinishReason.LENGTH), (16, FinishReason.ERROR_PARAMETERS)):
        driver = make_hostile_driver(token_ring_entries=16)
        assert outcome(driver, post(driver, {"num_logprobs": num_logprobs})) == reason
