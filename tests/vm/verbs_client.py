"""Runs in the SmartNIC's machine: drives RingClient over VerbsLink as a test says.

``python3 verbs_client.py SCENARIO '{"host": ..., ...}'``: one line of JSON per result.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.link import LinkError
from engine.link.verbs import VerbsLink, connect_verbs
from engine.link.verbs_config import VerbsConfig
from engine.protocol import FinishReason
from engine.ring import RequestParams, RingClient, Ticket

EOS = 257
DEADLINE_S = 120.0


links: list[VerbsLink] = []
"""Opened by this process; closed at its end, before the interpreter takes them apart."""


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def open_link(options: dict[str, Any]) -> VerbsLink:
    config = VerbsConfig.from_mapping(options.get("verbs", {}))
    session = connect_verbs(
        options["host"],
        port=options.get("port", 0),
        config=config,
        timeout_s=options.get("timeout_s", 30.0),
    )
    links.append(session.link)
    return session.link


def prompt_of(number: int) -> list[int]:
    generator = random.Random(number)
    return [generator.randrange(256) for _ in range(1 + number % 40)]


def run_requests(ring: RingClient, first: int, count: int, in_flight: int) -> dict[str, Any]:
    """The scripted model echoes the prompt, then ends: every id is known."""
    started = time.monotonic()
    live: dict[Ticket, tuple[int, list[int]]] = {}
    posted, wrong, ended, num_tokens = 0, [], 0, 0
    while ended < count and time.monotonic() - started < DEADLINE_S:
        while posted < count and len(live) < in_flight and ring.num_free_slots:
            number = first + posted
            ticket = ring.submit(RequestParams(max_tokens=64), [256, *prompt_of(number)])
            live[ticket] = (number, [])
            posted += 1
        for entry in ring.read_tokens(1.0):
            ticket = Ticket(int(entry["slot"]), int(entry["generation"]))
            number, ids = live[ticket]
            if entry["token"] >= 0:
                ids.append(int(entry["token"]))
                num_tokens += 1
            if entry["finish_reason"]:
                if ids != [*prompt_of(number), EOS] or entry["finish_reason"] != FinishReason.STOP:
                    wrong.append((number, ids, int(entry["finish_reason"])))
                ended += 1
                del live[ticket]
                ring.release(ticket)
    took_s = time.monotonic() - started
    return {"ended": ended, "wrong": wrong[:3], "num_tokens": num_tokens, "took_s": took_s}


def scenario_requests(options: dict[str, Any]) -> None:
    link = open_link(options)
    ring = RingClient(link)
    result = run_requests(ring, 0, options["count"], options["in_flight"])
    say(**result, description=link.info.description, window=link.info.window, state=link.state)
    ring.close()


def scenario_hold(options: dict[str, Any]) -> None:
    """Post requests and never read an answer."""
    ring = RingClient(open_link(options))
    for number in range(options["count"]):
        ring.submit(RequestParams(max_tokens=64), [256, *prompt_of(number)])
    say(posted=options["count"], session=ring.address.session)
    sys.stdin.read()


def scenario_stale(options: dict[str, Any]) -> None:
    """A SmartNIC that was replaced: whatever it still writes must be refused."""
    earlier = open_link(options)
    RingClient(earlier)
    later = open_link(options)
    ring = RingClient(later)
    offset = earlier.geometry.slot_offset(0)
    before = later.read(offset, 4096)
    try:
        earlier.write([(offset, b"\xee" * 4096)])
        earlier.flush()
        refused = ""
    except LinkError as error:
        refused = str(error)
    intact = later.read(offset, 4096) == before
    result = run_requests(ring, 0, 8, 4)
    say(refused=refused, intact=intact, ended=result["ended"], wrong=result["wrong"])


def scenario_memlock(options: dict[str, Any]) -> None:
    """As a user who may lock next to nothing."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
    os.setuid(1000)
    try:
        open_link(options)
        say(refused="")
    except LinkError as error:
        say(refused=str(error))


def scenario_reconnect(options: dict[str, Any]) -> None:
    """Requests until the link is lost, then links until one works again."""
    link = open_link(options)
    ring = RingClient(link)
    say(connected=True, session=ring.address.session)
    lost = ""
    started = time.monotonic()
    while not lost and time.monotonic() - started < DEADLINE_S:
        try:
            run_requests(ring, 0, 4, 4)
        except LinkError as error:
            lost = str(error)
    say(lost=lost, after_s=time.monotonic() - started)
    link.close()
    ring = RingClient(open_link({**options, "timeout_s": DEADLINE_S}))
    say(session=ring.address.session, **run_requests(ring, 0, 8, 4))


def scenario_probe(options: dict[str, Any]) -> None:
    """Bytes of many sizes written and read back, into the slots area."""
    link = open_link(options)
    RingClient(link)
    start = link.geometry.slot_offset(0)
    room = link.geometry.status_offset - start
    generator = np.random.default_rng(1)
    mtu = options.get("mtu", 1024)
    bad = []
    for size in (1, 8, 63, 64, 65, mtu - 1, mtu, mtu + 1, 4095, 4096, 4097, 65536, 65537, room):
        data = generator.bytes(min(size, room))
        link.write([(start, data)])
        if link.read(start, len(data)) != data:
            bad.append(size)
    say(bad=bad, description=link.info.description)


SCENARIOS: dict[str, Callable[[dict[str, Any]], None]] = {
    name.removeprefix("scenario_"): value
    for name, value in list(globals().items())
    if name.startswith("scenario_")
}


def main() -> int:
    try:
        SCENARIOS[sys.argv[1]](json.loads(sys.argv[2]))
    except LinkError as error:
        say(error=str(error))
        return 1
    finally:
        for link in links:
            link.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
