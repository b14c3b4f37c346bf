"""The ring as fast as it goes, producer and device in threads of their own."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import numpy as np

from engine import native
from engine.config import RingConfig, SchedulerConfig
from engine.host_scheduler import HostScheduler
from engine.protocol import COUNTERS
from engine.ring import RequestParams, RingClient, Ticket, encode_record
from engine.ring_library import CSRC, ring_library
from engine.scheduler_memory import ModelLimits
from tests.scheduler_driver import TestLink

HERE = Path(__file__).parent


def counters(host: HostScheduler) -> np.void:
    """Those of the first port, protocol.COUNTERS."""
    raw = host.memory.arrays["ports"]["counters"][0].tobytes()
    first: np.void = np.frombuffer(raw, COUNTERS.dtype)[0]
    return first


class TortureReport(ctypes.Structure):
    """Report of tests/csrc/torture.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("ended", "errors", "misrouted", "executed", "executed_torn")
    )


def test_no_torn_record_is_executed_however_fast_they_come() -> None:
    """Random sizes, every eighth doorbell before its payload and every eighth amid it."""
    path = native.build_library(
        [HERE / "csrc" / "torture.cpp", CSRC / "client.cpp"], include_dirs=[CSRC], name="torture"
    )
    library = ctypes.CDLL(str(path))
    library.bb_torture.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_void_p,
    ]
    limits = SchedulerConfig(
        num_pages=1024, max_running=64, max_step_tokens=1 << 14, max_context=200
    )
    ring = RingConfig(num_slots=64, token_ring_entries=64)
    host = HostScheduler(ring, limits, ModelLimits(20000, 200, ()))
    host.memory.word("torn_timeout_ns")[0] = 10**12
    count, report = 1_000_000, TortureReport()
    library.bb_torture(host.memory.state.ctypes.data, count, 60 * 10**9, ctypes.addressof(report))
    assert (report.executed_torn, report.errors, report.misrouted) == (0, 0, 0)
    assert (report.ended, report.executed) == (count, count)
    # Two doorbells in eight came too early; some of those were seen in time.
    assert counters(host)["records_torn"] > 100


def test_the_producer_in_c_gets_every_terminal() -> None:
    """bb_produce, with which the ring is measured, against the scripted model."""
    ring = RingConfig(num_slots=8, token_ring_entries=16)
    host = HostScheduler(
        ring, SchedulerConfig(max_running=8, max_context=64), ModelLimits(259, 64, (257,))
    )
    link = TestLink(host.port(), host.memory.geometry, "test")
    link.on_session = host.step
    client = RingClient(link)
    params = RequestParams(max_tokens=2, ignore_eos=True)
    record = bytearray(encode_record(params, [258, 65, 66], client.address, 0, Ticket(0, 0)))
    buffer = (ctypes.c_char * len(record)).from_buffer(record)
    ended: list[int] = []

    def produce() -> None:
        geometry = host.memory.geometry
        ended.append(
            ring_library().bb_produce(
                host.port().ctypes.data,
                2000,
                ctypes.addressof(buffer),
                geometry.slots_offset,
                geometry.tokens_offset,
                geometry.token_ring_entries,
                60 * 10**9,
            )
        )

    thread = threading.Thread(target=produce)
    thread.start()
    while thread.is_alive():
        host.step()
        host.scripted_pass()
    thread.join()
    assert ended == [2000]
    snapshot = client.snapshot()
    assert (snapshot.records_accepted, snapshot.generation_tokens) == (2000, 4000)
    assert snapshot.records_rejected == snapshot.doorbells_refused == 0
