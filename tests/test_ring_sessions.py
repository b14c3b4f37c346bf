"""A SmartNIC that dies and comes back, and what its former self still has on the way."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from engine.protocol import SLOT_STATUS, FinishReason, SlotState, control_offset
from engine.ring import RequestParams
from tests.hostile_ring import CANARY, CANARY_PROMPT, counter, make_driver, post
from tests.scheduler_driver import Driver, TestLink, answer


class RecordingLink(TestLink):
    """Remembers every WRITE, so that it can come once more, late."""

    written: list[tuple[int, bytes]]

    def write(self, chain: Sequence[tuple[int, bytes]]) -> None:
        self.written += chain
        super().write(chain)


def make_busy(driver: Driver) -> RecordingLink:
    """A SmartNIC with requests in every state: running, waiting, torn, ended, not picked up."""
    link = RecordingLink(driver.host.port(), driver.memory.geometry, "test")
    link.written = []
    driver.memory.word("torn_timeout_ns")[0] = 10**12
    driver.links[0] = driver.clients[0].link = link
    params = RequestParams(max_tokens=50, ignore_eos=True)
    asked = [driver.ask(params, [number]) for number in range(6)]
    torn = post(driver, {"sequence": 99})
    for _ in range(20):  # fills the log
        driver.step()
    driver.cancel(asked[0])
    driver.step()
    late = driver.ask(params, [7])  # never picked up before the end
    driver.cancel(late)
    states = driver.memory.arrays["sequences"]["state"].tolist()
    assert states[torn.ticket.slot] == SlotState.SUSPECT
    assert {SlotState.RUNNING, SlotState.WAITING, SlotState.ENDED} <= {*states}
    return link


def test_a_restarted_smartnic_gets_every_slot_back() -> None:
    driver = make_driver()
    make_busy(driver)
    driver.restart(0)
    assert driver.is_idle()
    status = driver.memory.geometry.status_offset
    raw = driver.links[0].read(status, 8 * SLOT_STATUS.dtype.itemsize)
    lines = np.frombuffer(raw, SLOT_STATUS.dtype)
    assert (lines["state"] == SlotState.FREE).all()
    assert (lines["generation"] == driver.memory.arrays["sequences"]["generation"]).all()
    asked = [driver.ask(CANARY, CANARY_PROMPT) for _ in range(8)]
    driver.run(200)
    assert all(request.tokens == answer(CANARY, CANARY_PROMPT)[0] for request in asked)
    assert counter(driver, "records_rejected") == 0


def test_late_writes_of_an_earlier_session_are_harmless() -> None:
    driver = make_driver()
    late = make_busy(driver).written
    session = control_offset("session")
    late = [(offset, data) for offset, data in late if offset != session]
    driver.restart(0)
    for round_number in range(5):
        asked = [driver.ask(CANARY, CANARY_PROMPT) for _ in range(8)]
        driver.step()  # picked up
        for offset, data in late:
            TestLink.write(driver.links[0], [(offset, data)])
            if round_number % 2:
                driver.step()
        driver.clients[0]._write_consumer_index()
        driver.run(200)
        assert all(request.tokens == answer(CANARY, CANARY_PROMPT)[0] for request in asked)
    assert counter(driver, "records_rejected") == 0
    assert counter(driver, "doorbells_refused") == 0


def test_a_cancel_after_a_late_cancel_of_an_earlier_session_is_not_lost() -> None:
    driver = make_driver()
    link = make_busy(driver)
    count = control_offset("cancel_count")
    late = [(offset, data) for offset, data in link.written if offset == count]
    driver.restart(0)
    asked = driver.ask(RequestParams(max_tokens=40, ignore_eos=True), [1])
    driver.step()
    for write in late:
        TestLink.write(driver.links[0], [write])
        driver.step()
    driver.memory.arrays["ports"]["cancels_until_ns"] = 0
    driver.cancel(asked)
    driver.run(5)
    assert asked.reason == FinishReason.CANCELLED


def test_a_restart_disturbs_no_other_port() -> None:
    driver = make_driver(num_ports=2)
    other = driver.ask(RequestParams(max_tokens=50, ignore_eos=True), [9], port=1)
    for number in range(20):
        driver.ask(RequestParams(max_tokens=30, ignore_eos=True), [number], port=0)
        driver.restart(0)
    driver.run(200)
    assert other.tokens == answer(other.params, other.prompt)[0]


def test_an_idle_device_stays_idle_beside_a_doorbell_never_rung() -> None:
    """What a killed SmartNIC posted last must not keep the device awake for ever."""
    driver = make_driver()
    driver.ask(CANARY, CANARY_PROMPT)
    driver.restart(0)
    driver.step()
    library = driver.host._library
    library.bb_anything_new.argtypes = [ctypes.c_void_p]
    assert not library.bb_anything_new(driver.memory.state.ctypes.data)
    driver.ask(CANARY, CANARY_PROMPT)
    assert library.bb_anything_new(driver.memory.state.ctypes.data)
