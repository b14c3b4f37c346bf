"""Signs of life: the heartbeat, tokens, the link, the scheduler's own state."""

from __future__ import annotations

from engine.protocol import EngineState
from engine.smartnic.health import Health

RUNNING = int(EngineState.RUNNING)


def test_a_heartbeat_that_advances_is_life() -> None:
    health = Health(3.0, 0.0)
    for second in range(20):
        health.observe(second, RUNNING, float(second))
        assert health.lost_reason(second + 2.9) is None


def test_a_heartbeat_that_stands_still_is_not_and_may_come_back() -> None:
    health = Health(3.0, 0.0)
    health.observe(7, RUNNING, 1.0)
    health.observe(7, RUNNING, 3.9)
    assert health.lost_reason(3.9) is None
    assert "heartbeat" in str(health.lost_reason(4.1))
    health.observe(8, RUNNING, 9.0)
    assert health.lost_reason(9.0) is None


def test_tokens_are_life_too() -> None:
    health = Health(3.0, 0.0)
    health.observe(7, RUNNING, 1.0)
    health.tokens_arrived(4.0)
    assert health.lost_reason(6.9) is None


def test_a_failed_link_counts_at_once_until_a_read_succeeds() -> None:
    health = Health(3.0, 0.0)
    health.observe(1, RUNNING, 1.0)
    health.link_failed("QP in error state")
    assert "QP in error state" in str(health.lost_reason(1.1))
    health.observe(2, RUNNING, 1.2)
    assert health.lost_reason(1.2) is None


def test_a_stopped_scheduler_is_lost_however_fresh_its_heartbeat() -> None:
    for state in (EngineState.FATAL, EngineState.STOPPED):
        health = Health(3.0, 0.0)
        health.observe(1, int(state), 1.0)
        assert state.name in str(health.lost_reason(1.0))
