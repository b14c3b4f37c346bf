"""Runs in the SmartNIC's machine: what no honest SmartNIC does, over true RDMA, on a port of its
own. The engine must refuse or survive it, and serve the other ports meanwhile.

    python3 attack.py NAME '{"host": ..., "port": ..., "seconds": ...}'

Prints one line of JSON; the exit status is 0 when the engine stood it.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from engine import protocol
from engine.link import LinkError
from engine.link.verbs import VerbsLink, connect_verbs
from engine.protocol import FinishReason
from engine.ring import RequestParams, RingClient, Ticket, encode_record

EOS = 257  # of the scripted model, which repeats its prompt
POISON = b"\xee"
ENTRY_TIMEOUT_S = 1.0
LAST_ANSWERS_S = 60.0
BATCH = 16

Facts = dict[str, Any]


def open_link(options: Facts) -> VerbsLink:
    """A link to the port that the options name, which takes the port over."""
    return connect_verbs(options["host"], port=options.get("port", 0)).link


def refused_write(link: VerbsLink, offset: int, data: bytes) -> str:
    """Why the other side refused a WRITE; "" if it did not."""
    try:
        link.write([(offset, data)])
        link.flush()
    except LinkError as error:
        return str(error)
    return ""


def stale_rkey(options: Facts) -> Facts:
    """A live queue pair with the key of an earlier session."""
    earlier = open_link(options)
    rkey = earlier._rkey
    earlier.close()
    link = open_link(options)
    offset = link.geometry.slot_offset(0)
    link._rkey = rkey
    refused = refused_write(link, offset, POISON * 4096)
    link.close()
    checker = open_link(options)
    intact = POISON * 64 not in checker.read(offset, 4096)
    checker.close()
    return {"refused": refused, "intact": intact, "stood": bool(refused) and intact}


def outside(options: Facts) -> Facts:
    """WRITEs just before and just behind the registered port, into its neighbours."""
    refused = []
    for is_behind in (False, True):
        link = open_link(options)
        link._refuse_range = lambda offset, nbytes: None  # type: ignore[method-assign]
        offset = link.geometry.port_bytes if is_behind else -64
        refused.append(refused_write(link, offset, POISON * 64))
        link.close()
    return {"refused": refused, "stood": all(refused)}


def stale_epoch(options: Facts) -> Facts:
    """A record of an earlier start of the engine, over a sound link."""
    ring = RingClient(open_link(options))
    ring.address = dataclasses.replace(ring.address, epoch=ring.address.epoch - 1)
    ring.submit(RequestParams(max_tokens=4), [256, 1, 2])
    reasons: list[int] = []
    deadline = time.monotonic() + LAST_ANSWERS_S
    while not reasons and time.monotonic() < deadline:
        reasons = [int(entry["finish_reason"]) for entry in ring.read_tokens(ENTRY_TIMEOUT_S)]
    ring.close()
    names = [FinishReason(reason).name for reason in reasons]
    return {"reasons": names, "stood": names == ["ERROR_EPOCH"]}


class Torture:
    """Records of random size as fast as they go; every eighth doorbell comes before its payload,
    every eighth amid it. The answer of the scripted model shows what was executed.
    """

    def __init__(self, options: Facts) -> None:
        self.ring = RingClient(open_link(options))
        self.geometry = self.ring.geometry
        self.longest = min(200, self.geometry.max_context // 2 - 2)
        self.random = random.Random(options.get("seed", 1))
        self.live: dict[Ticket, list[int]] = {}
        self.answers: dict[Ticket, list[int]] = {}
        self.num_posted = self.num_ended = self.num_wrong = self.num_early = 0
        self.reasons: dict[str, int] = {}

    def post(self) -> None:
        """One request; what `RingClient.submit` does, with the doorbell where it is wanted."""
        ring, geometry = self.ring, self.geometry
        prompt = [256, *self.random.choices(range(256), k=self.random.randint(1, self.longest))]
        slot = ring._free.pop()
        generation = (ring._generations[slot] + 1) & 0xFFFFFFFF
        ring._generations[slot] = generation
        ring._sequence += 1
        ticket = Ticket(slot, generation)
        params = RequestParams(max_tokens=len(prompt) + 1)
        record = encode_record(params, prompt, ring.address, ring._sequence, ticket)
        word = protocol.doorbell_word(ring._sequence, ring.address.session, slot)
        bell = (geometry.doorbell_offset(ring._sequence), word.to_bytes(8, "little"))
        at = geometry.slot_offset(slot)
        half = len(record) // 128 * 64
        parts = [(at, record[:half]), (at + half, record[half:])] if half else [(at, record)]
        place = {0: 0, 1: 1}.get(ring._sequence % 8, len(parts))
        self.num_early += place < len(parts)
        parts.insert(place, bell)
        for part in parts:
            ring.link.write([part])  # one at a time: the device may look in between
        self.live[ticket] = [*prompt[1:], EOS]
        self.answers[ticket] = []
        self.num_posted += 1

    def collect(self) -> None:
        """Take answers and compare them with what was asked."""
        for entry in self.ring.read_tokens(ENTRY_TIMEOUT_S):
            ticket = Ticket(int(entry["slot"]), int(entry["generation"]))
            if ticket not in self.live:
                self.num_wrong += 1
                continue
            if entry["token"] >= 0:
                self.answers[ticket].append(int(entry["token"]))
            if entry["finish_reason"]:
                reason = FinishReason(int(entry["finish_reason"])).name
                self.reasons[reason] = self.reasons.get(reason, 0) + 1
                self.num_wrong += self.answers.pop(ticket) != self.live.pop(ticket)
                self.num_ended += 1
                self.ring.release(ticket)

    def run(self, seconds: float) -> Facts:
        """Until the time is up and every answer is there."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            while self.ring.num_free_slots >= BATCH:
                for _ in range(BATCH):
                    self.post()
            self.collect()
        while self.live and time.monotonic() < end + LAST_ANSWERS_S:
            self.collect()
        snapshot = self.ring.snapshot()
        self.ring.close()
        return {
            "posted": self.num_posted,
            "early_doorbells": self.num_early,
            "ended": self.num_ended,
            "wrong": self.num_wrong,
            "reasons": self.reasons,
            "looks_at_torn_records": snapshot.records_torn,
            "stood": self.num_ended == self.num_posted > 0 and self.num_wrong == 0,
        }


def torture(options: Facts) -> Facts:
    """See Torture."""
    return Torture(options).run(options.get("seconds", 10.0))


ATTACKS: dict[str, Callable[[Facts], Facts]] = {
    "stale-rkey": stale_rkey,
    "outside": outside,
    "stale-epoch": stale_epoch,
    "ring-torture": torture,
}


def main() -> int:
    try:
        facts = ATTACKS[sys.argv[1]](json.loads(sys.argv[2]))
    except LinkError as error:
        facts = {"error": str(error), "stood": False}
    print(json.dumps(facts), flush=True)
    return 0 if facts["stood"] else 1


if __name__ == "__main__":
    sys.exit(main())
