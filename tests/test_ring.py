"""Producer and consumer of the ring against a device that sees every fault a link may have."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import (
    FinishReason,
    control_offset,
)
from engine.ring import RequestParams, RingFull, Ticket, encode_record
from tests.hostile_ring import (
    CANARY,
    CANARY_PROMPT,
    canary,
    counter,
    make_driver,
    outcome,
    picked_up,
    post,
    ring_doorbell,
)
from tests.scheduler_driver import VOCAB_SIZE, Driver, TestLink, answer

HERE = Path(__file__).parent
FIXED = settings(max_examples=40, deadline=None, derandomize=True, database=None)


class FaultyLink(TestLink):
    """Delivers WRITEs in pieces, in any order within a chain, while the device goes on."""

    rng: random.Random
    meanwhile: Callable[[], None]
    is_in_order = False

    def write(self, chain: Sequence[tuple[int, bytes]]) -> None:
        pieces = []
        for offset, data in chain:
            cuts = [0, len(data)]
            if len(data) > 8:  # a word arrives whole
                cuts[1:1] = sorted(self.rng.sample(range(1, len(data)), 3))
            pieces += [(offset + a, data[a:b]) for a, b in itertools.pairwise(cuts)]
        if not self.is_in_order:
            self.rng.shuffle(pieces)
        for piece in pieces:
            super().write([piece])
            while self.rng.random() < 0.3:
                self.meanwhile()


def make_faulty(driver: Driver, seed: int) -> FaultyLink:
    """Put a faulty link under the driver's only client."""
    link = FaultyLink(driver.host.port(), driver.memory.geometry, "test")
    link.rng, link.meanwhile = random.Random(seed), driver.step
    driver.links[0] = driver.clients[0].link = link
    return link


@FIXED
@given(seed=st.integers(0, 1 << 32), is_in_order=st.booleans())
def test_torn_and_late_writes_change_no_answer(seed: int, is_in_order: bool) -> None:
    rng = random.Random(seed)
    driver = make_driver()
    driver.memory.word("torn_timeout_ns")[0] = 10**12
    make_faulty(driver, seed).is_in_order = is_in_order
    for number in range(30):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
        # The model must know the parameters before the device may see the record.
        slot = driver.clients[0]._free[-1]
        params = RequestParams(max_tokens=rng.randint(1, 20), seed=number)
        driver.params[slot] = params
        asked = driver.ask(params, prompt)
        if rng.random() < 0.2:
            driver.cancel(asked)
        while not driver.clients[0].num_free_slots:
            driver.step()
            driver.read(limit=rng.randint(0, 9))
    driver.run(500)
    driver.check_answers()
    assert len(driver.done) == 30
    assert (
        counter(driver, "records_accepted")
        + sum(asked.reason == FinishReason.CANCELLED and not asked.tokens for asked in driver.done)
        >= 30
    )
    assert counter(driver, "records_rejected") == 0
    if not is_in_order:
        assert counter(driver, "records_torn") > 0


def test_a_doorbell_before_its_payload_is_detected() -> None:
    driver = make_driver()
    driver.memory.word("torn_timeout_ns")[0] = 10**12
    client = driver.clients[0]
    slot = client._free[-1]
    ticket = Ticket(slot, 1)
    record = encode_record(CANARY, CANARY_PROMPT, client.address, 1, ticket)
    ring_doorbell(driver, client, slot, client.address.session)
    for nbytes in (0, 4, 64, 128, len(record) - 4):
        client.link.write([(client.geometry.slot_offset(slot), record[:nbytes])])
        driver.step()
        assert len(driver.rows) == 0
    assert counter(driver, "records_torn") == 5
    driver.params[slot] = CANARY
    client.link.write([(client.geometry.slot_offset(slot), record)])
    driver.step()
    assert driver.rows["seq"].tolist() == [slot]
    assert counter(driver, "records_accepted") == 1


def test_a_cancel_word_that_comes_after_its_count_is_not_lost() -> None:
    driver = make_driver()
    driver.memory.word("torn_timeout_ns")[0] = 10**12
    asked = driver.ask(RequestParams(max_tokens=59, ignore_eos=True), CANARY_PROMPT)
    driver.step()
    driver.links[0].write([(control_offset("cancel_count"), (9).to_bytes(8, "little"))])
    for _ in range(5):
        driver.step()
    word = asked.ticket.generation.to_bytes(4, "little")
    driver.links[0].write([(driver.memory.geometry.cancel_offset(asked.ticket.slot), word)])
    asked.is_cancelled = True
    driver.run(3)
    driver.check_answers()
    assert asked.reason == FinishReason.CANCELLED


def test_an_earlier_record_in_the_slot_is_not_executed_again() -> None:
    """The doorbell comes first, and the slot still holds a whole, intact record of the last use."""
    driver = make_driver()
    canary(driver)
    client = driver.clients[0]
    ring_doorbell(driver, client, 0, client.address.session)
    client._free.remove(0)
    driver.step()
    (entry,) = client.read_tokens(0)
    assert entry["finish_reason"] == FinishReason.ERROR_TORN


def test_a_record_that_never_heals_ends_and_blocks_nobody() -> None:
    driver = make_driver()
    driver.memory.word("torn_timeout_ns")[0] = 10**12
    torn = post(driver, {}, crc_is_right=True)
    offset = driver.clients[0].geometry.slot_offset(torn.ticket.slot)
    driver.links[0].write([(offset + 130, b"\xff")])
    canary(driver)
    assert counter(driver, "records_torn") > 5
    driver.memory.arrays["sequences"]["deadline_ns"] = 0  # its time is up
    assert outcome(driver, torn) == FinishReason.ERROR_TORN
    canary(driver)
    assert driver.is_idle()


def test_everything_wraps() -> None:
    """Sequences pass 2^32, generations too, and the logs go round many times."""
    driver = make_driver(num_slots=2, token_ring_entries=16)
    memory = driver.memory
    memory.arrays["ports"]["next_sequence"] = (1 << 32) - 50
    memory.arrays["sequences"]["generation"] = (1 << 32) - 20
    driver.restart(0)
    for _ in range(120):
        canary(driver)
    assert picked_up(driver) == (1 << 32) - 51 + 120
    assert memory.arrays["ports"][0]["token_tail"] == 120 * 12


def test_a_full_ring_refuses_and_then_goes_on() -> None:
    driver = make_driver()
    for _ in range(3):
        asked = [driver.ask(CANARY, CANARY_PROMPT) for _ in range(8)]
        with pytest.raises(RingFull):
            driver.clients[0].submit(CANARY, CANARY_PROMPT)
        driver.run(200)
        assert all(request.tokens == answer(CANARY, CANARY_PROMPT)[0] for request in asked)


def test_an_empty_ring_gives_nothing() -> None:
    driver = make_driver()
    for _ in range(10):
        driver.step()
        assert len(driver.clients[0].read_tokens(0)) == 0
        assert len(driver.rows) == 0


def test_the_status_tells_how_a_request_went() -> None:
    driver = make_driver()
    asked = driver.ask(CANARY, CANARY_PROMPT)
    driver.run(50)
    times = driver.clients[0].slot_times(asked.ticket.slot)
    assert times.generation == asked.ticket.generation
    assert times.num_generated == 12
    stamps = [times.picked_up_ns, times.admitted_ns, times.first_token_ns, times.finished_ns]
    assert stamps == sorted(stamps)
    assert stamps[0] > 0
