"""The ring protocol's parts: geometry, records, check sums, sessions of an empty ring."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import protocol
from engine.config import RingConfig, SchedulerConfig
from engine.host_scheduler import scheduler_library
from engine.link.shm import SharedMemoryLink
from engine.protocol import RECORD, Geometry
from engine.reference import philox_uniform
from engine.ring import (
    Address,
    HandshakeError,
    RequestParams,
    RingClient,
    Ticket,
    encode_record,
)
from engine.ring_library import crc32c
from tests.scheduler_driver import Driver

ARGUMENTS = {"num_slots": 4, "token_ring_entries": 16, "max_context": 8, "vocab_size": 9}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_slots", 3),
        ("num_slots", 0),
        ("num_slots", 1 << 17),
        ("token_ring_entries", 24),
        ("max_context", 1),
        ("vocab_size", 1),
    ],
)
def test_geometry_names_what_is_wrong(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        Geometry(**ARGUMENTS | {name: value})


@pytest.mark.parametrize(
    ("data", "expected"),
    [  # RFC 3720, appendix B.4, and the customary check value
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_crc32c_gives_the_published_values(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


def test_philox_gives_the_published_value() -> None:
    """Random123's known answers: philox4x32-10, key and counter 0, first word 6627e8d5."""
    library = scheduler_library()
    assert library.bb_philox_uniform(0, 0) == (0x6627E8D5 >> 8) / (1 << 24)
    assert philox_uniform(0, 0) == (0x6627E8D5 >> 8) / (1 << 24)


@settings(deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, (1 << 64) - 1), position=st.integers(0, (1 << 32) - 1))
def test_both_philox_agree_and_stay_below_one(seed: int, position: int) -> None:
    draw = scheduler_library().bb_philox_uniform(seed, position)
    assert draw == philox_uniform(seed, position)
    assert 0 <= draw < 1


def test_a_record_is_laid_out_as_declared() -> None:
    params = RequestParams(
        max_tokens=5, stop_token_ids=(8, 7), logit_bias=((3, -1.5),), ignore_eos=True, seed=-1
    )
    record = encode_record(params, [1, 2, 3], Address(9, 4), 77, Ticket(2, 6))
    header = np.frombuffer(record[:128], RECORD.dtype)[0]
    assert len(record) == header["record_bytes"] == 128 + 4 * (2 + 2 + 3)
    assert header["crc32c"] == crc32c(record[4:])
    assert (header["epoch"], header["session"], header["sequence"]) == (9, 4, 77)
    assert (header["slot"], header["generation"], header["flags"]) == (2, 6, 1)
    assert header["seed"] == (1 << 64) - 1
    tail = np.frombuffer(record[128:], "<u4")
    assert tail.tolist() == [8, 7, 3, np.float32(-1.5).view(np.uint32), 1, 2, 3]


@settings(deadline=None, derandomize=True, database=None, max_examples=50)
@given(data=st.data())
def test_any_flipped_bit_is_noticed(data: st.DataObject) -> None:
    record = bytearray(
        encode_record(RequestParams(), list(range(20)), Address(1, 1), 1, Ticket(0, 1))
    )
    bit = data.draw(st.integers(0, 8 * len(record) - 1))
    record[bit // 8] ^= 1 << bit % 8
    assert crc32c(bytes(record[4:])) != int.from_bytes(record[:4], "little")


def make_driver() -> Driver:
    return Driver(RingConfig(num_slots=4, token_ring_entries=16), SchedulerConfig(max_context=64))


def test_zeroed_memory_is_an_empty_ring() -> None:
    """No session, no doorbell, no cancel, no token, whatever number of steps."""
    from engine.host_scheduler import HostScheduler
    from engine.scheduler_memory import ModelLimits

    host = HostScheduler(RingConfig(), SchedulerConfig(), ModelLimits(9, 2048, ()))
    size = protocol.IDENTITY.dtype.itemsize
    assert not host.port()[size:].any()
    for _ in range(5):
        host.step()
    geometry = host.memory.geometry
    link = SharedMemoryLink(host.port(), geometry, "test")
    assert len(link.read_tokens(0, 0)) == 0
    assert not np.frombuffer(link.read(geometry.tokens_offset, 32 * 8192), np.uint8).any()
    assert host.memory.state[0]["error"] == 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("magic", 0, "not a Blinkbed window"),
        ("version", 99, "install the same version"),
        ("layout_hash", 1, "install the same version"),
    ],
)
def test_another_build_is_refused(field: str, value: int, message: str) -> None:
    driver = make_driver()
    line = driver.host.port()[:64].view(protocol.IDENTITY.dtype)
    line[field] = value
    with pytest.raises(HandshakeError, match=message):
        RingClient(driver.links[0])


def test_a_device_that_does_not_answer_is_reported() -> None:
    driver = make_driver()
    driver.links[0].on_session = lambda: None
    with pytest.raises(HandshakeError, match=r"did not answer within 0\.01 s"):
        RingClient(driver.links[0], timeout_s=0.01)


@pytest.mark.parametrize(
    ("params", "prompt"),
    [
        (RequestParams(stop_token_ids=(0,) * 33), [1]),
        (RequestParams(logit_bias=((0, 0.0),) * 301), [1]),
        (RequestParams(), [1] * 65),
        (RequestParams(), [-1]),
        (RequestParams(), [1 << 32]),
        (RequestParams(max_tokens=-1), [1]),
        (RequestParams(top_k=1 << 31), [1]),
        (RequestParams(num_logprobs=16), [1]),  # the token ring has 16 entries
    ],
)
def test_what_cannot_be_written_is_a_value_error(params: RequestParams, prompt: list[int]) -> None:
    driver = make_driver()
    with pytest.raises(ValueError, match=r"."):
        driver.clients[0].submit(params, prompt)
    assert driver.clients[0].num_free_slots == 4
    driver.ask(RequestParams(max_tokens=1), [1])
    driver.run(5)
