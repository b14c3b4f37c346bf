"""Runs in the SmartNIC's machine: figures of the verbs link, as one line of JSON.

``python3 link_figures.py '{"host": ..., "rounds": N}'``. Times in us: a bare pyverbs WRITE
acknowledged, our record and doorbell as one chain acknowledged, and the whole way: record written,
picked up by the engine, its progress seen by READ; encoding a record; a request of one token, from
submit to its terminal entry. Bandwidth of 64 KiB WRITEs in MB/s.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine import native
from engine.link.verbs import VerbsLink, connect_verbs
from engine.link.verbs_errors import enums, pyverbs
from engine.protocol import C_CONSTANTS, PROGRESS, doorbell_word
from engine.ring import RequestParams, RingClient, Ticket, encode_record

PREBUILT = Path(native.__file__).parent / "prebuilt" / "ring-client.so"
RECORD_TOKENS = 64
STREAM_BYTES = 1 << 16
STREAM_COUNT = 400
BLOCK, WARM_UP = 20, 3
PICKUP_TIMEOUT_S = 5.0


def percentiles(times_s: list[float]) -> dict[str, float]:
    """p10, p50 and p99 in us."""
    ordered = sorted(times_s)
    return {
        "p10_us": ordered[len(ordered) // 10] * 1e6,
        "p50_us": ordered[len(ordered) // 2] * 1e6,
        "p99_us": ordered[len(ordered) * 99 // 100] * 1e6,
    }


Once = Callable[[], float]
"""Does its thing once and says how long that took, s."""


def timed(link: VerbsLink, once: Callable[[], object]) -> Once:
    """A thing whose whole call counts. What earlier ones left in flight is awaited first: a
    completion of theirs would be taken for its own.
    """

    def run() -> float:
        link.flush()
        started = time.perf_counter()
        once()
        return time.perf_counter() - started

    return run


def measure(rounds: int, things: Mapping[str, Once]) -> dict[str, dict[str, float]]:
    """Times of each thing, taking turns in blocks: what else the host does hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in things}
    for _ in range(rounds // BLOCK):
        for name, once in things.items():
            for number in range(-WARM_UP, BLOCK):
                took_s = once()
                if number >= 0:
                    times[name].append(took_s)
    return {name: percentiles(values) for name, values in times.items()}


def bare_write(link: VerbsLink, num_bytes: int) -> Callable[[], None]:
    """A WRITE as a program with nothing but pyverbs makes it: post, poll without pause."""
    wr, e = pyverbs("wr"), enums()
    queue_pair, peer = link._queue_pair, link._peer
    region = link._region
    element = wr.SGE(region.buf, num_bytes, region.lkey)
    address = peer.address + link.geometry.slot_offset(0)

    def once() -> None:
        request = wr.SendWR(num_sge=1, sg=[element], opcode=e.IBV_WR_RDMA_WRITE)
        request.set_wr_rdma(peer.rkey, address)
        queue_pair.qp.post_send(request)
        while True:
            count, completions = queue_pair.cq.poll(1)
            if count:
                assert completions[0].status == 0
                return

    return once


def main() -> int:
    if PREBUILT.exists():  # no compiler here
        native.build_library = lambda *_, **__: PREBUILT
    options: dict[str, Any] = json.loads(sys.argv[1])
    link = connect_verbs(options["host"]).link
    ring = RingClient(link)
    prompt = list(range(RECORD_TOKENS))
    record = encode_record(RequestParams(), prompt, ring.address, 1, Ticket(0, 0))
    # A doorbell of another session was never rung: the engine does not look at the record.
    idle = doorbell_word(0, ring.address.session ^ 1, 0).to_bytes(8, "little")

    writes = [(link.geometry.slot_offset(0), record), (link.geometry.doorbell_offset(0), idle)]

    def chain() -> None:
        link.write(writes)
        link.flush()

    def encode() -> bytes:
        return encode_record(RequestParams(), prompt, ring.address, 1, Ticket(0, 0))

    things = {
        "bare_8": timed(link, bare_write(link, 8)),
        "bare_record": timed(link, bare_write(link, len(record))),
        "chain": timed(link, chain),
        "read_64": timed(link, lambda: link.read(64, 64)),
        "pickup": lambda: pick_up(ring, link, prompt),
        "encode": timed(link, encode),
        "round_trip": timed(link, lambda: round_trip(ring, prompt)),
    }
    result: dict[str, Any] = {"record_bytes": len(record), "description": link.info.description}
    result.update(measure(options["rounds"], things))
    result["stream_mb_s"] = stream(link)
    print(json.dumps(result), flush=True)
    return 0


class Recorder:
    """Stands before the link while a request is encoded: keeps its chain, unsent."""

    def __init__(self, link: VerbsLink) -> None:
        self._link = link
        self.chain: list[tuple[int, bytes]] = []

    def write(self, chain: Sequence[tuple[int, bytes]]) -> None:
        self.chain = list(chain)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


def pick_up(ring: RingClient, link: VerbsLink, prompt: list[int]) -> float:
    """From the post of an encoded request until a READ of the progress line shows it taken."""
    offset = C_CONSTANTS["kProgressOffset"] + PROGRESS.offset("picked_up")
    recorder = Recorder(link)
    ring.link = recorder
    ticket = ring.submit(RequestParams(max_tokens=1), prompt)
    ring.link = link
    sequence = int.from_bytes(recorder.chain[1][1], "little") >> 32
    link.flush()
    started = time.perf_counter()
    link.write(recorder.chain)
    while int.from_bytes(link.read(offset, 8), "little") < sequence:
        assert time.perf_counter() - started < PICKUP_TIMEOUT_S, "the engine does not pick up"
    took_s = time.perf_counter() - started
    drain(ring, [ticket])
    return took_s


def drain(ring: RingClient, pending: list[Ticket]) -> None:
    """Take the answers of all pending requests."""
    while pending:
        for entry in ring.read_tokens(1.0):
            if entry["finish_reason"]:
                ticket = Ticket(int(entry["slot"]), int(entry["generation"]))
                pending.remove(ticket)
                ring.release(ticket)


def round_trip(ring: RingClient, prompt: list[int]) -> None:
    """A request of one token: posted, executed, its terminal entry seen by READ."""
    drain(ring, [ring.submit(RequestParams(max_tokens=1), prompt)])


def stream(link: VerbsLink) -> float:
    """MB/s of 64 KiB WRITEs, many in flight, until the last is acknowledged."""
    data = bytes(STREAM_BYTES)
    start = link.geometry.slot_offset(0)
    started = time.perf_counter()
    for _ in range(STREAM_COUNT):
        link.write([(start, data)])
    link.flush()
    return STREAM_BYTES * STREAM_COUNT / (time.perf_counter() - started) / 1e6


if __name__ == "__main__":
    sys.exit(main())
