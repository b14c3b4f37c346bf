"""The ring between two processes over shared memory: pickup time, and throughput of one producer.

    python -m loadtests.bench_ring

A simulated device runs the persistent loop with the scripted model; this process is the only
producer. Pickup: from the call that writes record and doorbell to the device's time stamp (one
clock): with 5 ms between records, when the idle poller still looks all the time, and with 50 ms,
when it sleeps between two looks. Throughput: 512-byte records with one answer token each, written
by native code as fast as slots come free.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from engine.child import Child
from engine.config import ModelConfig, RingConfig, SchedulerConfig, ServeConfig
from engine.handshake import Session, connect
from engine.launcher import DEVICE_MODULES
from engine.link.shm import SharedMemoryLink
from engine.protocol import RECORD
from engine.ring import RequestParams, RingClient, Ticket, encode_record
from engine.ring_library import ring_library
from engine.runtime_dir import RuntimeDir

RECORD_BYTES = 512
NUM_RECORDS = 400_000
NUM_PICKUPS = 300
PAUSE_S = 0.005  # the poller looks all the time
LONG_PAUSE_S = 0.05  # the poller sleeps 10 us between two looks


@contextlib.contextmanager
def device_and_host(config: ServeConfig) -> Iterator[Session]:
    """A simulated device and its host, without a SmartNIC: the caller is the SmartNIC."""
    with contextlib.ExitStack() as stack:
        runtime = stack.enter_context(RuntimeDir())
        config = config.replace(runtime_dir=str(runtime.path))
        config_path = runtime.path / "config.json"
        config_path.write_text(config.to_json())
        socket = config.device_socket
        device_module = DEVICE_MODULES[config.device.device]
        device = start(stack, runtime.path, "device", device_module, "--socket", str(socket))
        wait_for(device, socket.exists)
        host = start(stack, runtime.path, "host", "engine.host", "--config", str(config_path))
        wait_for(host, lambda: is_ready(host))
        yield connect(config.handshake_socket)


def start(stack: contextlib.ExitStack, folder: Path, name: str, module: str, *args: str) -> Child:
    """Start one role; the stack ends it."""
    command = [sys.executable, "-m", module, *args]
    child = Child(name, command, log_path=folder / f"{name}.log", environment=os.environ)
    stack.callback(child.close)
    return child


def is_ready(child: Child) -> bool:
    """Whether it has said so by now."""
    child.read_reports()
    return child.ready is not None


def wait_for(child: Child, condition: Callable[[], bool]) -> None:
    """Poll until the condition holds; raises RuntimeError with the child's last words."""
    deadline = time.monotonic() + 120
    while not condition():
        if not child.is_running or time.monotonic() > deadline:
            raise RuntimeError(f"{child.name} did not start: {child.last_words()}")
        time.sleep(0.01)


class TimedLink(SharedMemoryLink):
    """Notes when each chain was handed over."""

    written_ns = 0

    def write(self, chain: Sequence[tuple[int, bytes]]) -> None:
        if len(chain) == 2:
            self.written_ns = time.monotonic_ns()
        super().write(chain)


def pickup_times_us(client: RingClient, link: TimedLink, pause_s: float, count: int) -> list[float]:
    """One record at a time: microseconds from its write to its pickup, sorted."""
    times = []
    for _ in range(count):
        time.sleep(pause_s)
        ticket = client.submit(RequestParams(max_tokens=1), [256, 258, 65])
        written_ns = link.written_ns
        while not any(entry["finish_reason"] for entry in client.read_tokens(1.0)):
            pass
        times.append((client.slot_times(ticket.slot).picked_up_ns - written_ns) / 1e3)
        client.release(ticket)
    return sorted(times)


def records_per_s(client: RingClient, link: TimedLink) -> float:
    """Records per second of one native producer; all of them answered."""
    prompt = [65] * ((RECORD_BYTES - 128) // 4)
    raw = encode_record(RequestParams(max_tokens=1), prompt, client.address, 1, Ticket(0, 1))
    assert len(raw) == RECORD_BYTES
    geometry = client.geometry
    generations = {client.slot_times(slot).generation for slot in range(geometry.num_slots)}
    assert generations == {0}, "the producer needs a fresh port"
    record = np.frombuffer(raw, np.uint8).copy()
    generation = RECORD.offset("generation")
    record[generation : generation + 4] = 0  # the one before the first
    started = time.perf_counter()
    ended = ring_library().bb_produce(
        link.address,
        NUM_RECORDS,
        record.ctypes.data_as(ctypes.c_void_p),
        geometry.slots_offset,
        geometry.tokens_offset,
        geometry.token_ring_entries,
        60_000_000_000,
    )
    elapsed_s = time.perf_counter() - started
    if ended != NUM_RECORDS:
        raise RuntimeError(f"only {ended} of {NUM_RECORDS} records were answered within 60 s")
    return NUM_RECORDS / elapsed_s


def measure() -> dict[str, float | int]:
    """Both figures, each on a stack of its own."""
    config = ServeConfig(
        model=ModelConfig("scripted"),
        ring=RingConfig(num_slots=256),
        scheduler=SchedulerConfig(max_running=256, max_step_tokens=32768, num_pages=4096),
    )
    result: dict[str, float | int] = {"record_bytes": RECORD_BYTES}
    for figure in ("pickup", "throughput"):
        with device_and_host(config) as session:
            assert isinstance(session.link, SharedMemoryLink)
            link = TimedLink(session.link.memory, session.link.geometry, session.link.info.window)
            client = RingClient(link)
            if figure == "pickup":
                times_us = pickup_times_us(client, link, LONG_PAUSE_S, NUM_PICKUPS // 5)
                result["sleeping_pickup_median_us"] = round(statistics.median(times_us), 1)
                times_us = pickup_times_us(client, link, PAUSE_S, NUM_PICKUPS)
                result["pickup_median_us"] = round(statistics.median(times_us), 1)
                result["pickup_p99_us"] = round(times_us[int(0.99 * len(times_us))], 1)
            else:
                result["records_per_s"] = round(records_per_s(client, link))
                snapshot = client.snapshot()
                result["records_torn"] = snapshot.records_torn
                result["records_rejected"] = snapshot.records_rejected
    return result


if __name__ == "__main__":
    print(json.dumps(measure()))
