"""Records and words that no honest SmartNIC would write, thrown at a scheduler that serves others.

As a program (`python -m tests.hostile_ring LIBRARY ROUNDS`) it runs against another build of the
scheduler: a test gives it one with address and undefined-behaviour sanitizers.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.config import RingConfig, SchedulerConfig
from engine.protocol import (
    COUNTERS,
    PROGRESS,
    RECORD,
    FinishReason,
    control_offset,
    doorbell_word,
)
from engine.ring import RequestParams, RingClient, Ticket, encode_record
from engine.ring_library import crc32c
from tests.scheduler_driver import VOCAB_SIZE, Asked, Driver, answer

CANARY = RequestParams(max_tokens=12, ignore_eos=True)
CANARY_PROMPT = [5, 4, 3, 2, 1]


def make_driver(step: Any = None, **ring: int) -> Driver:
    ring = {"num_slots": 8, "num_ports": 1, "token_ring_entries": 32} | ring
    limits = SchedulerConfig(
        num_pages=40, page_size=4, max_running=4, max_step_tokens=32, max_context=64, debug=True
    )
    driver = Driver(RingConfig(**ring), limits, step=step)
    driver.memory.word("torn_timeout_ns")[0] = 0  # torn is torn: the first look decides
    return driver


def canary(driver: Driver, port: int = 0) -> None:
    """A fixed request gets its known tokens, one in each step."""
    asked = driver.ask(CANARY, CANARY_PROMPT, port)
    for _ in range(CANARY.max_tokens + 2):
        driver.step()
        driver.read(port)
    expected = answer(CANARY, CANARY_PROMPT)
    assert (asked.tokens, asked.reason) == expected


def ring_doorbell(driver: Driver, client: RingClient, slot: int, session: int) -> None:
    """The next doorbell, whatever it points at."""
    client._sequence += 1
    word = doorbell_word(client._sequence, session, slot).to_bytes(8, "little")
    client.link.write([(client.geometry.doorbell_offset(client._sequence), word)])


def post(
    driver: Driver,
    fields: Mapping[str, Any],
    *,
    prompt: list[int] | None = None,
    crc_is_right: bool = True,
    params: RequestParams = CANARY,
) -> Asked:
    """Post a record of which some header fields were overwritten."""
    client = driver.clients[0]
    slot = client._free.pop()
    ticket = Ticket(slot, (client._generations[slot] + 1) & 0xFFFFFFFF)
    prompt = CANARY_PROMPT if prompt is None else prompt
    raw = bytearray(encode_record(params, prompt, client.address, client._sequence + 1, ticket))
    header = np.frombuffer(raw, RECORD.dtype, count=1)[0]
    for name, value in fields.items():
        header[name] = value
    if crc_is_right:
        nbytes = min(max(int(header["record_bytes"]), 4), len(raw))
        header["crc32c"] = crc32c(bytes(raw[4:nbytes]))
    client.link.write([(client.geometry.slot_offset(slot), bytes(raw))])
    ring_doorbell(driver, client, slot, client.address.session)
    asked = Asked(0, ticket, params, tuple(prompt))
    driver.params[slot] = params
    return asked


def outcome(driver: Driver, asked: Asked, max_steps: int = 120) -> FinishReason:
    """How a hostile request ended: read by hand, since its entries may name another generation."""
    client = driver.clients[0]
    reasons: list[int] = []
    for _ in range(max_steps):
        driver.step()
        for entry in client.read_tokens(0):
            slot = int(entry["slot"])
            if slot in driver.live[0]:
                driver._take(0, entry)
                continue
            assert slot == asked.ticket.slot
            assert not reasons, "an entry after the terminal"
            if entry["finish_reason"]:
                reasons.append(int(entry["finish_reason"]))
                # Who says it is another generation is answered as that, and the slot follows.
                client._generations[slot] = int(entry["generation"])
        if reasons and not driver.live[0]:
            break
    (reason,) = reasons
    client._free.append(asked.ticket.slot)
    return FinishReason(reason)


def counter(driver: Driver, name: str) -> int:
    counters = np.frombuffer(driver.memory.arrays["ports"]["counters"][0].tobytes(), COUNTERS.dtype)
    return int(counters[0][name])


def hostile_value(rng: random.Random, name: str) -> Any:
    dtype = RECORD.dtype[name]
    if dtype.kind == "f":
        return np.frombuffer(rng.randbytes(4), "<f4")[0]
    bits = 8 * dtype.itemsize
    value = rng.choice(
        [0, 1, 2, 63, 64, 65, rng.randrange(300), rng.getrandbits(bits // 2)]
        if rng.random() < 0.5
        else [(1 << bits) - 1, 1 << bits - 1, (1 << bits - 1) - 1, rng.getrandbits(bits)]
    )
    return value - (1 << bits) if dtype.kind == "i" and value >> bits - 1 else value


FIELDS = [name for name in RECORD.dtype.names or () if name not in ("crc32c", "reserved")]


def hostile_round(driver: Driver, rng: random.Random) -> FinishReason | None:
    """One abuse of a random kind, a bystander beside it, then the canary."""
    bystander = driver.ask(RequestParams(max_tokens=20, seed=3), [rng.randrange(VOCAB_SIZE)] * 9)
    driver.step()
    client, reason = driver.clients[0], None
    kind = rng.choice(["fields", "fields", "fields", "ids", "doorbell", "words"])
    if kind == "fields":
        names = rng.sample(FIELDS, rng.choice([1, 1, 1, 2, 4]))
        fields = {name: hostile_value(rng, name) for name in names}
        asked = post(driver, fields, crc_is_right=rng.random() < 0.8)
        reason = outcome(driver, asked)
    elif kind == "ids":
        prompt = [rng.choice([0, VOCAB_SIZE - 1, VOCAB_SIZE, rng.getrandbits(32)])] * 3
        params = RequestParams(max_tokens=3, stop_token_ids=(rng.getrandbits(32),))
        if rng.random() < 0.5:
            params = RequestParams(max_tokens=3, logit_bias=((rng.getrandbits(6), float("inf")),))
        reason = outcome(driver, post(driver, {}, prompt=prompt, params=params))
    elif kind == "doorbell":
        live = bystander.ticket.slot
        slot = rng.choice([live, 8, 9, 0xFFFF, 1 << 15])
        ring_doorbell(driver, client, slot, client.address.session)
    else:
        garbage = rng.randbytes(32)
        client.link.write([(client.geometry.cancel_offset(0), garbage)])
        client.link.write([(control_offset("cancel_count"), rng.randbytes(8))])
        client.link.write([(control_offset("consumer_index"), rng.randbytes(8))])
        driver.step()
        client._write_consumer_index()
    driver.run(200)
    assert bystander.tokens == answer(bystander.params, bystander.prompt)[0]
    canary(driver)
    assert driver.is_idle()
    return reason


def picked_up(driver: Driver) -> int:
    """The sequence that the device says it took last."""
    progress = np.frombuffer(driver.links[0].read(64, PROGRESS.dtype.itemsize), PROGRESS.dtype)
    return int(progress[0]["picked_up"])


def main(library_path: str, rounds: int) -> None:
    step = ctypes.CDLL(library_path).bb_scheduler_step
    step.argtypes, step.restype = [ctypes.c_void_p], None
    for seed in range(rounds):
        rng = random.Random(seed)
        driver = make_driver(step)
        for _ in range(10):
            hostile_round(driver, rng)
    print(f"{10 * rounds} rounds")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
