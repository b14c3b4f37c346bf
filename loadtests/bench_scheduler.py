"""How long one turn of the scheduler takes, compiled for the host, at a steady load.

    python -m loadtests.bench_scheduler

256 sequences decode while 1,024 wait; every turn publishes 256 tokens, polls the ring, tries to
admit, and plans the next pass. The scripted model stands in for the forward pass and is not timed.
"""

from __future__ import annotations

import json
import statistics
import time

from engine.config import RingConfig, SchedulerConfig
from engine.host_scheduler import HostScheduler
from engine.link.shm import SharedMemoryLink
from engine.ring import RequestParams, RingClient
from engine.scheduler_memory import ModelLimits

NUM_RUNNING, NUM_WAITING, NUM_STEPS = 256, 1024, 1000


def loaded_scheduler() -> tuple[HostScheduler, RingClient]:
    """A scheduler with NUM_RUNNING decoding and NUM_WAITING waiting."""
    prompt = [256, *range(30), 258, 65]
    num_pages = NUM_RUNNING * (len(prompt) + 2 * NUM_STEPS + 64) // 16
    scheduler = SchedulerConfig(
        num_pages=num_pages, max_running=NUM_RUNNING, max_step_tokens=8192, max_context=4096
    )
    host = HostScheduler(RingConfig(num_slots=2048), scheduler, ModelLimits(259, 4096, (257,)))
    link = SharedMemoryLink(host.port(), host.memory.geometry, "this process")
    client = open_client(host, link)
    for _ in range(NUM_RUNNING + NUM_WAITING):
        client.submit(RequestParams(max_tokens=3 * NUM_STEPS, ignore_eos=True), prompt)
    while client.snapshot().num_waiting != NUM_WAITING:
        turn(host, client)
    return host, client


def open_client(host: HostScheduler, link: SharedMemoryLink) -> RingClient:
    """Open a session with a scheduler that somebody has to turn."""
    import threading

    stop = threading.Event()

    def turns() -> None:
        while not stop.is_set():
            host.step()

    thread = threading.Thread(target=turns)
    thread.start()
    try:
        return RingClient(link)
    finally:
        stop.set()
        thread.join()


def turn(host: HostScheduler, client: RingClient) -> float:
    """One pass and one turn; seconds that the turn took."""
    host.scripted_pass()
    client.read_tokens(0)
    started = time.perf_counter()
    host.step()
    return time.perf_counter() - started


def measure() -> dict[str, float | int]:
    """Median and p99 of a turn, microseconds."""
    host, client = loaded_scheduler()
    for _ in range(50):
        turn(host, client)
    times_us = sorted(1e6 * turn(host, client) for _ in range(NUM_STEPS))
    snapshot = client.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting) == (NUM_RUNNING, NUM_WAITING)
    return {
        "running": snapshot.num_running,
        "waiting": snapshot.num_waiting,
        "turns": len(times_us),
        "median_us": round(statistics.median(times_us), 2),
        "p99_us": round(times_us[int(0.99 * len(times_us))], 2),
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
