"""The offer in the window's memory, and the messages of the verbs handshake."""

from __future__ import annotations

import socket

import pytest

from engine.link.verbs_config import VerbsConfig
from engine.link.verbs_exchange import receive_message, send_message
from engine.link.verbs_offer import (
    offer_bytes,
    offer_serial,
    read_offer,
    withdraw_offer,
    write_offer,
)
from engine.link.verbs_qp import QueuePairFacts

OFFER = {"version": 1, "card": {"model_id": "é" * 100}}
FACTS = QueuePairFacts(17, 99, "0000:0000:0000:0000:0000:ffff:0a09:0001", 4096, 1, 2, 3)


def test_an_offer_is_read_back_and_withdrawn() -> None:
    memory = memoryview(bytearray(4096))
    assert read_offer(memory) is None
    assert offer_serial(memory) == 0
    write_offer(memory, OFFER)
    assert read_offer(memory) == OFFER
    first = offer_serial(memory)
    withdraw_offer(memory)
    assert read_offer(memory) is None
    assert offer_serial(memory) == 0
    write_offer(memory, OFFER)
    assert offer_serial(memory) > first


def test_an_offer_touches_only_the_end_of_the_memory() -> None:
    memory = memoryview(bytearray(4096))
    write_offer(memory, OFFER)
    assert not any(memory[: 4096 - offer_bytes(OFFER)])


def test_a_half_written_offer_is_none() -> None:
    memory = memoryview(bytearray(4096))
    write_offer(memory, OFFER)
    memory[4096 - 100] ^= 1
    assert read_offer(memory) is None


def test_an_offer_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        write_offer(memoryview(bytearray(64)), OFFER)


def test_messages_arrive_whole_and_long_ones_are_refused() -> None:
    one, other = socket.socketpair()
    with one, other:
        send_message(one, {"verbs": FACTS.to_mapping()})
        message = receive_message(other, 4096)
        assert QueuePairFacts.from_mapping(message["verbs"]) == FACTS
        send_message(one, {"text": "x" * 100})
        with pytest.raises(ValueError, match="longer than 50"):
            receive_message(other, 50)


@pytest.mark.parametrize(
    "fields",
    [None, [], {}, {"qpn": 1}, {**FACTS.to_mapping(), "qpn": "1"},
     {**FACTS.to_mapping(), "mtu_bytes": 1500}, {**FACTS.to_mapping(), "more": 1}],
)  # fmt: skip
def test_facts_that_are_none_are_refused(fields: object) -> None:
    with pytest.raises(ValueError, match=r"facts|number|mtu_bytes"):
        QueuePairFacts.from_mapping(fields)


def test_the_default_gives_a_silent_peer_up_after_a_second() -> None:
    assert 0.5 < VerbsConfig().loss_s < 1.5


def test_a_retry_count_that_means_for_ever_is_refused() -> None:
    with pytest.raises(ValueError, match="retry_count=7"):
        VerbsConfig(retry_count=7)
