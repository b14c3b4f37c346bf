"""Fields, ids, doorbells and words that no honest SmartNIC would write harm nobody else."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import RingConfig, SchedulerConfig
from engine.protocol import FIRST_ERROR, FinishReason, control_offset
from engine.ring import RequestParams
from tests.hostile_ring import (
    CANARY,
    CANARY_PROMPT,
    FIELDS,
    canary,
    counter,
    hostile_round,
    hostile_value,
    make_driver,
    outcome,
    post,
    ring_doorbell,
)
from tests.scheduler_driver import VOCAB_SIZE, Driver, answer

HOSTILE = [
    ({"epoch": 2}, FinishReason.ERROR_EPOCH),
    ({"session": 7}, FinishReason.ERROR_SESSION),
    ({"slot": 2}, FinishReason.ERROR_RECORD),
    ({"generation": 0}, FinishReason.ERROR_GENERATION),
    ({"generation": 9}, FinishReason.ERROR_GENERATION),
    ({"sequence": 9}, FinishReason.ERROR_TORN),
    ({"record_bytes": 127}, FinishReason.ERROR_TORN),
    ({"record_bytes": 144}, FinishReason.ERROR_RECORD),
    ({"record_bytes": 0}, FinishReason.ERROR_TORN),
    ({"record_bytes": 0xFFFFFFFC}, FinishReason.ERROR_TORN),
    ({"num_prompt_tokens": 0}, FinishReason.ERROR_RECORD),
    ({"num_prompt_tokens": 4}, FinishReason.ERROR_RECORD),
    ({"num_prompt_tokens": 0xFFFFFFFF}, FinishReason.ERROR_RECORD),
    ({"num_stop_token_ids": 1 << 30}, FinishReason.ERROR_RECORD),
    ({"num_logit_bias": 1 << 31}, FinishReason.ERROR_RECORD),
    ({"max_tokens": 0}, FinishReason.ERROR_PARAMETERS),
    ({"max_tokens": 60}, FinishReason.ERROR_CONTEXT),
    ({"max_tokens": 0xFFFFFFFF}, FinishReason.ERROR_CONTEXT),
    ({"temperature": float("nan")}, FinishReason.ERROR_PARAMETERS),
    ({"temperature": float("inf")}, FinishReason.ERROR_PARAMETERS),
    ({"temperature": -1}, FinishReason.ERROR_PARAMETERS),
    ({"top_p": 0}, FinishReason.ERROR_PARAMETERS),
    ({"top_p": 1.5}, FinishReason.ERROR_PARAMETERS),
    ({"min_p": -0.5}, FinishReason.ERROR_PARAMETERS),
    ({"top_k": -1}, FinishReason.ERROR_PARAMETERS),
    ({"repetition_penalty": 0}, FinishReason.ERROR_PARAMETERS),
    ({"frequency_penalty": float("nan")}, FinishReason.ERROR_PARAMETERS),
    ({"presence_penalty": float("-inf")}, FinishReason.ERROR_PARAMETERS),
    ({"num_logprobs": 21}, FinishReason.ERROR_PARAMETERS),
    ({"num_logprobs": -2}, FinishReason.ERROR_PARAMETERS),
    ({"max_tokens": 59}, FinishReason.LENGTH),  # exactly the context
    ({"min_tokens": 0xFFFFFFFF}, FinishReason.LENGTH),
    ({"priority": -(1 << 31)}, FinishReason.LENGTH),
]


@pytest.mark.parametrize(("fields", "reason"), HOSTILE)
def test_a_hostile_field_ends_its_own_request(fields: dict[str, Any], reason: FinishReason) -> None:
    driver = make_driver()
    bystander = driver.ask(CANARY, CANARY_PROMPT)
    driver.step()
    assert outcome(driver, post(driver, fields)) == reason
    assert bystander.tokens == answer(CANARY, CANARY_PROMPT)[0]
    assert counter(driver, "records_rejected") == (reason >= FIRST_ERROR)
    canary(driver)


@pytest.mark.parametrize("token", [VOCAB_SIZE, 1 << 31, 0xFFFFFFFF])
@pytest.mark.parametrize("place", ["prompt", "stop_token_ids", "logit_bias"])
def test_an_id_outside_the_vocabulary_is_refused(place: str, token: int) -> None:
    driver = make_driver()
    params, prompt = CANARY, [1, 2]
    if place == "prompt":
        prompt = [1, token]
    elif place == "stop_token_ids":
        params = RequestParams(stop_token_ids=(1, token))
    else:
        params = RequestParams(logit_bias=((1, 0.5), (token, 0.5)))
    asked = post(driver, {}, params=params, prompt=prompt)
    assert outcome(driver, asked) == FinishReason.ERROR_TOKEN_ID
    canary(driver)


def test_a_bias_that_is_no_number_is_refused() -> None:
    driver = make_driver()
    for bias in (float("nan"), float("inf")):
        asked = post(driver, {}, params=RequestParams(logit_bias=((1, bias),)))
        assert outcome(driver, asked) == FinishReason.ERROR_TOKEN_ID


def test_a_request_larger_than_the_pool_is_refused() -> None:
    ring = RingConfig(num_slots=2, token_ring_entries=16)
    driver = Driver(ring, SchedulerConfig(num_pages=3, page_size=4, max_context=64))
    asked = driver.ask(RequestParams(max_tokens=10), [1, 2, 3])
    exact = driver.ask(RequestParams(max_tokens=9, ignore_eos=True), [1, 2, 3])
    driver.run(20)
    assert asked.reason == FinishReason.ERROR_CONTEXT
    assert exact.reason == FinishReason.LENGTH


@pytest.mark.parametrize("name", FIELDS)
def test_extreme_values_of_each_field_harm_nobody(name: str) -> None:
    rng = random.Random(name)
    driver = make_driver()
    for number in range(12):
        fields = {name: hostile_value(rng, name)}
        outcome(driver, post(driver, fields, crc_is_right=number % 4 > 0))
    canary(driver)
    assert driver.is_idle()


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 1 << 32))
def test_random_hostility_harms_nobody(seed: int) -> None:
    rng = random.Random(seed)
    driver = make_driver()
    for _ in range(8):
        hostile_round(driver, rng)


def test_a_doorbell_for_no_slot_or_a_live_one_is_counted() -> None:
    driver = make_driver()
    client = driver.clients[0]
    live = driver.ask(CANARY, CANARY_PROMPT)
    driver.step()
    for slot in (8, 0xFFFF, live.ticket.slot):
        ring_doorbell(driver, client, slot, client.address.session)
    driver.run(50)
    assert live.tokens == answer(CANARY, CANARY_PROMPT)[0]
    assert counter(driver, "doorbells_refused") == 3
    canary(driver)


def test_a_consumer_index_outside_the_log_is_ignored() -> None:
    driver = make_driver()
    asked = driver.ask(RequestParams(max_tokens=59, ignore_eos=True), CANARY_PROMPT)
    for _ in range(50):
        index = random.Random(1).getrandbits(64) | 1 << 63
        driver.links[0].write([(control_offset("consumer_index"), index.to_bytes(8, "little"))])
        driver.step()
    assert driver.memory.arrays["ports"][0]["token_tail"] == 32  # full, and nothing overwritten
    assert counter(driver, "indices_refused") == 50
    driver.run(200)
    assert asked.tokens == answer(asked.params, asked.prompt)[0]
