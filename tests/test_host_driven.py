"""The host-driven paths give the same tokens as the device-driven one, whatever clients do."""

from __future__ import annotations

import ctypes
import json
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from engine.config import RingConfig, SchedulerConfig
from engine.control.host_driven import CapturedPass
from engine.host_scheduler import HostScheduler, scheduler_library
from engine.protocol import FinishReason
from engine.ring import RequestParams, RingClient, Ticket, encode_record
from engine.ring_library import ring_library
from engine.scheduler_memory import ModelLimits, SchedulerMemory
from engine.state import Command
from tests.chat_client import complete, get, scripted_canary
from tests.host_driven_driver import (
    FAKE_XP,
    FakeModule,
    FakeStream,
    HostDrivenDriver,
    OneStep,
    void,
)
from tests.scheduler_driver import TestLink
from tests.scheduler_traces import MAX_CONTEXT, finish, run_random_trace
from tests.server import start_server
from tests.test_http_sampling import check_adjustments

PATHS = ("sync", "async")
NUM_TRACES = 150


class Producer:
    """bb_produce in a thread: posts again as soon as a slot's terminal entry is there."""

    def __init__(self, host: HostScheduler, record: bytes, count: int) -> None:
        self.num_ended = 0
        self._host, self._record, self._count = host, bytearray(record), count
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        geometry = self._host.memory.geometry
        buffer = (ctypes.c_char * len(self._record)).from_buffer(self._record)
        self.num_ended = ring_library().bb_produce(
            self._host.port().ctypes.data,
            self._count,
            ctypes.addressof(buffer),
            geometry.slots_offset,
            geometry.tokens_offset,
            geometry.token_ring_entries,
            100 * 10**9,
        )


def make_driver(path: str, rng: random.Random) -> HostDrivenDriver:
    page_size = rng.choice([1, 2, 4])
    scheduler = SchedulerConfig(
        num_pages=rng.randint(MAX_CONTEXT // page_size, 2 * MAX_CONTEXT // page_size),
        page_size=page_size,
        max_running=rng.randint(1, 6),
        max_step_tokens=rng.randint(6, 2 * MAX_CONTEXT),
        max_context=MAX_CONTEXT,
        debug=True,
    )
    ring = RingConfig(num_slots=8, num_ports=2, token_ring_entries=rng.choice([16, 32]))
    return HostDrivenDriver(ring, scheduler, path, rng)


@pytest.mark.parametrize("path", PATHS)
def test_random_traces_end_rightly(path: str) -> None:
    """Arrivals, cancellations, preemption, full token rings, restarts of SmartNICs."""
    num_preemptions = num_stopped = 0
    for seed in range(NUM_TRACES):
        rng = random.Random(seed)
        driver = make_driver(path, rng)
        run_random_trace(driver, rng, num_steps=25)
        finish(driver, rng.choice([Command.RUN, Command.DRAIN, Command.STOP]))
        num_preemptions += sum(c.snapshot().num_preemptions for c in driver.clients)
        num_stopped += sum(asked.reason == FinishReason.STOP for asked in driver.done)
    assert num_preemptions > NUM_TRACES
    assert num_stopped > NUM_TRACES


def test_who_sees_the_end_may_use_the_slot_at_once() -> None:
    """A producer in C posts to a slot within a microsecond of its terminal entry; with asynchronous
    batching a sample planned too many may still be under way then.
    """
    num_requests = 5000
    ring = RingConfig(num_slots=2, token_ring_entries=64)
    scheduler = SchedulerConfig(max_running=2, max_context=64, num_pages=64)
    limits = ModelLimits(259, 64, (257,))
    host = HostScheduler(ring, scheduler, limits)
    window = np.zeros(host.memory.window.size, np.uint8)
    device = SchedulerMemory(np, window, ring, scheduler, limits, 1)
    library, state = scheduler_library(), ctypes.c_void_p(device.state.ctypes.data)
    FakeStream.is_eager = lambda: True
    launcher = CapturedPass(
        FAKE_XP,
        device,
        FakeModule(device),
        lambda: FakeStream.enqueue(lambda: void(library.bb_scripted_pass(state))),
    )
    loop = OneStep(FAKE_XP, host.memory, launcher, depth=2)
    link = TestLink(host.port(), host.memory.geometry, "test")
    link.on_session = loop._step
    client = RingClient(link)
    record = encode_record(RequestParams(max_tokens=30), [258, 65], client.address, 0, Ticket(0, 0))
    producer = Producer(host, record, num_requests)
    while producer.thread.is_alive():
        loop._step()
    snapshot = client.snapshot()
    assert snapshot.doorbells_refused == snapshot.records_rejected == 0
    assert producer.num_ended == num_requests


@pytest.mark.parametrize("path", PATHS)
def test_the_server_serves(path: str) -> None:
    with start_server(path=path) as server:
        assert server.ready.path == path
        for _ in range(3):
            assert scripted_canary(server.url) == "canary"
        metrics = get(f"{server.url}/metrics")[1].decode()
        assert "blinkbed_engine_steps_total" in metrics
        assert server.stack.stop() == 0


@pytest.mark.parametrize("path", PATHS)
def test_greedy_ids_equal_the_reference(path: str) -> None:
    """All prompts at once, as choices of one request; then what adjusts logits."""
    entries = json.loads((Path(__file__).parent / "reference/smollm2_greedy.json").read_text())
    count = max(entry["safe_tokens"] for entry in entries)
    with start_server(path=path, model="smollm2") as server:
        answer = complete(
            server.url,
            timeout_s=120,
            prompt=[entry["prompt_ids"] for entry in entries],
            max_tokens=count,
            temperature=0,
            ignore_eos=True,
            return_token_ids=True,
        )
        check_adjustments(server.url)
    for entry, choice in zip(entries, answer["choices"], strict=True):
        safe = entry["safe_tokens"]
        assert choice["token_ids"][:safe] == entry["output_ids"][:safe]
