"""The compiled scheduler and its readable twin: equal traces, equal plans."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import RingConfig, SchedulerConfig
from engine.ring import RequestParams
from engine.state import Command
from tests.scheduler_driver import VOCAB_SIZE, Driver
from tests.scheduler_traces import (
    MAX_CONTEXT,
    Ask,
    act,
    finish,
    make_small_driver,
    run_random_trace,
)

FIXED = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TOKEN = st.integers(0, VOCAB_SIZE - 1)


@st.composite
def configurations(draw: st.DrawFn) -> tuple[RingConfig, SchedulerConfig]:
    page_size = draw(st.sampled_from([1, 2, 4, 8]))
    chunked = draw(st.booleans())
    max_running = draw(st.integers(1, 6))
    least = max_running if chunked else MAX_CONTEXT
    scheduler = SchedulerConfig(
        num_pages=draw(st.integers(-(-MAX_CONTEXT // page_size), 3 * MAX_CONTEXT // page_size)),
        page_size=page_size,
        max_running=max_running,
        max_step_tokens=draw(st.integers(least, 2 * MAX_CONTEXT)),
        max_context=MAX_CONTEXT,
        chunked_prefill=chunked,
        debug=True,
    )
    ring = RingConfig(
        num_slots=draw(st.sampled_from([2, 4, 8])),
        num_ports=draw(st.integers(1, 2)),
        token_ring_entries=draw(st.sampled_from([16, 32])),
    )
    return ring, scheduler


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    prompt = draw(st.lists(TOKEN, min_size=1, max_size=MAX_CONTEXT - 1))
    params = RequestParams(
        max_tokens=draw(st.integers(1, MAX_CONTEXT - len(prompt))),
        min_tokens=draw(st.sampled_from([0, 0, 1, 3, 1 << 31, (1 << 32) - 1])),
        temperature=draw(st.sampled_from([0.0, 0.5])),
        seed=draw(st.integers(0, (1 << 64) - 1)),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=tuple(draw(st.lists(TOKEN, max_size=2))),
        logit_bias=tuple(draw(st.lists(st.tuples(TOKEN, st.integers(-3, 3)), max_size=3))),
        num_logprobs=draw(st.sampled_from([-1, -1, 0, 1, 5, 15])),
        priority=draw(st.sampled_from([0, 0, 0, -3, 2])),
    )
    fails = draw(st.integers(0, 9)) == 9
    return Ask(draw(st.integers(0, 1)), params, tuple(prompt), fails)


PORT = st.integers(0, 1)
ACTIONS = st.one_of(
    asks(),
    asks(),
    st.tuples(st.just("cancel"), st.integers(0, 15)),
    st.tuples(st.just("read"), PORT, st.sampled_from([0, 1, 3, 1 << 30])),
    st.tuples(st.just("index"), PORT, st.integers(-40, 40)),
    st.tuples(st.just("restart"), PORT),
)
TRACES = st.lists(st.lists(ACTIONS, max_size=4), min_size=1, max_size=30)


@FIXED
@given(configuration=configurations(), trace=TRACES, end=st.sampled_from(list(Command)))
def test_short_traces_give_the_twins_plans(
    configuration: tuple[RingConfig, SchedulerConfig], trace: list[list[Any]], end: Command
) -> None:
    driver = Driver(*configuration, with_twin=True)
    for actions in trace:
        for action in actions:
            act(driver, action)
        driver.step()
    finish(driver, end)


@settings(FIXED, max_examples=60)
@given(configuration=configurations(), seed=st.integers(0, 1 << 32), end=st.sampled_from(Command))
def test_long_traces_give_the_twins_plans(
    configuration: tuple[RingConfig, SchedulerConfig], seed: int, end: Command
) -> None:
    driver = make_small_driver(*configuration, random.Random(seed))
    run_random_trace(driver, random.Random(seed), num_steps=80)
    finish(driver, end)
