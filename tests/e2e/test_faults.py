"""Faults of whole containers: what was asked for ends once, and the stack serves again after."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from compose.fault import DEFAULT, FAULTS, heal, is_frozen
from compose.stack import ContainerStack
from tests.chat_client import get
from tests.e2e.client import Reply, Traffic
from tests.e2e.report import Report
from tests.e2e.test_streams import say
from tests.http_client import canary, wait_idle
from tests.server import wait_until

NUM_CLIENTS = 8
TEXT = "0123456789abcdef" * 64
ENDS_WITHIN_S = 5.0
RECOVERS_WITHIN_S = 30.0


@contextmanager
def traffic_on(stack: ContainerStack) -> Iterator[Traffic]:
    """Clients that have their first whole answers when the block begins."""
    with Traffic(stack.url, lambda number: say(TEXT), num_clients=NUM_CLIENTS) as traffic:
        wait_until(lambda: len(traffic.replies) >= NUM_CLIENTS, 60, "the first answers")
        assert all(reply.is_complete for reply in traffic.replies)
        yield traffic


def heal_and_measure(stack: ContainerStack, report: Report, name: str) -> None:
    """Heal, and note how long after it the first right answer came."""
    heal(stack)
    healed_s = time.monotonic()

    def answers() -> bool:
        try:
            canary(stack.url, within_s=60)
        except (AssertionError, OSError):
            return False
        return True

    wait_until(answers, RECOVERS_WITHIN_S, "a right answer")
    report.recovery_s[name] = time.monotonic() - healed_s


def assert_each_ended_once(replies: list[Reply]) -> None:
    assert replies
    assert all(len(reply.ends) == 1 for reply in replies), [r.ends for r in replies if r.ends[1:]]
    assert all(reply.text == TEXT for reply in replies if reply.is_complete)


@pytest.fixture(autouse=True)
def _whole_again(scripted: ContainerStack) -> Iterator[None]:
    """Also after a test that failed."""
    yield
    heal(scripted)


def test_smartnic_killed(scripted: ContainerStack, report: Report) -> None:
    with traffic_on(scripted) as traffic:
        began = time.monotonic()
        FAULTS["smartnic-killed"].apply(scripted, DEFAULT)
        wait_until(
            lambda: sum(r.started_s < began < r.ended_s for r in list(traffic.replies)) > 0,
            ENDS_WITHIN_S,
            "what was under way has ended",
        )
    # A new port is published, and nobody waits for what the dead one had taken.
    heal_and_measure(scripted, report, "smartnic-killed")
    assert_each_ended_once(traffic.replies)
    wait_idle(scripted.url, timeout_s=10)


def test_gpu_side_killed(scripted: ContainerStack, report: Report) -> None:
    with traffic_on(scripted) as traffic:
        FAULTS["gpu-killed"].apply(scripted, DEFAULT)
        killed_s = time.monotonic()
        wait_until(lambda: get(f"{scripted.url}/readyz")[0] == 503, ENDS_WITHIN_S, "/readyz is 503")
        assert get(f"{scripted.url}/livez")[0] == 200
        wait_until(
            lambda: any(r.ends == ["status 503"] for r in list(traffic.replies)),
            ENDS_WITHIN_S,
            "new requests are refused",
        )
    under_way = [r for r in traffic.replies if r.started_s < killed_s < r.ended_s]
    assert all(r.ended_s - killed_s < ENDS_WITHIN_S for r in under_way)
    heal_and_measure(scripted, report, "gpu-killed")
    assert_each_ended_once(traffic.replies)
    wait_idle(scripted.url, timeout_s=10)


def test_host_killed_and_nobody_notices(scripted: ContainerStack) -> None:
    with traffic_on(scripted) as traffic:
        FAULTS["host-killed"].apply(scripted, DEFAULT)
        killed_s = time.monotonic()
        wait_until(
            lambda: traffic.num_complete_since(killed_s) >= NUM_CLIENTS, 60, "answers without host"
        )
    assert all(reply.is_complete for reply in traffic.replies)
    assert_each_ended_once(traffic.replies)
    canary(scripted.url, within_s=60)


def test_smartnic_paused_loses_nothing(scripted: ContainerStack, report: Report) -> None:
    with traffic_on(scripted) as traffic:
        FAULTS["smartnic-paused"].apply(scripted, DEFAULT)
        time.sleep(ENDS_WITHIN_S)  # the length of the pause, not a synchronisation
        heal_and_measure(scripted, report, "smartnic-paused")
    assert all(reply.is_complete for reply in traffic.replies)
    assert_each_ended_once(traffic.replies)
    wait_idle(scripted.url, timeout_s=10)


def test_gpu_side_paused(scripted: ContainerStack, report: Report) -> None:
    with traffic_on(scripted) as traffic:
        FAULTS["gpu-paused"].apply(scripted, DEFAULT)
        wait_until(lambda: get(f"{scripted.url}/readyz")[0] == 503, ENDS_WITHIN_S, "/readyz is 503")
        wait_until(
            lambda: any(r.ends == ["status 503"] for r in list(traffic.replies)),
            ENDS_WITHIN_S,
            "new requests are refused",
        )
        heal_and_measure(scripted, report, "gpu-paused")
    assert_each_ended_once(traffic.replies)
    wait_idle(scripted.url, timeout_s=10)


def test_slow_consumer_loses_nothing(scripted: ContainerStack, report: Report) -> None:
    with traffic_on(scripted) as traffic:
        FAULTS["slow-consumer"].apply(scripted, DEFAULT)
        assert is_frozen(scripted.container("smartnic"))
        time.sleep(ENDS_WITHIN_S)  # thousands of tokens long: the token ring is full
        heal_and_measure(scripted, report, "slow-consumer")
    assert all(reply.is_complete for reply in traffic.replies)
    assert_each_ended_once(traffic.replies)
    wait_idle(scripted.url, timeout_s=10)


def test_network_cut_and_connected_again(scripted: ContainerStack, report: Report) -> None:
    with traffic_on(scripted) as traffic:
        FAULTS["network-cut"].apply(scripted, DEFAULT)
        time.sleep(ENDS_WITHIN_S)  # the length of the cut, not a synchronisation
        heal_and_measure(scripted, report, "network-cut")
    assert_each_ended_once(traffic.replies)
    wait_idle(scripted.url, timeout_s=10)
