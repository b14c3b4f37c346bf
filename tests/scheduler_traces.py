"""Random traces: what clients, good and bad, do to a scheduler between its steps.

As a program (`python -m tests.scheduler_traces LIBRARY SEEDS`) it drives another build of the
scheduler beside the twin: a test gives it a team of threads under the thread sanitizer.
"""

from __future__ import annotations

import ctypes
import random
import sys
from dataclasses import dataclass
from typing import Any

from engine.config import RingConfig, SchedulerConfig
from engine.protocol import EngineState, FinishReason, control_offset
from engine.ring import RequestParams
from engine.state import Command
from tests.scheduler_driver import VOCAB_SIZE, Driver

MAX_CONTEXT = 48


@dataclass(frozen=True)
class Ask:
    port: int
    params: RequestParams
    prompt: tuple[int, ...]
    model_fails: bool


def act(driver: Driver, action: Any) -> None:
    num_ports = len(driver.clients)
    if isinstance(action, Ask):
        port = action.port % num_ports
        if driver.clients[port].num_free_slots:
            asked = driver.ask(action.params, action.prompt, port)
            seq = port * driver.memory.geometry.num_slots + asked.ticket.slot
            (driver.error_rows.add if action.model_fails else driver.error_rows.discard)(seq)
        return
    kind, *arguments = action
    if kind == "cancel":
        alive = [asked for live in driver.live for asked in live.values()]
        if alive:
            driver.cancel(alive[arguments[0] % len(alive)])
        return
    port = arguments[0] % num_ports
    if kind == "read":
        driver.read(port, arguments[1])
    elif kind == "index":
        write_bad_index(driver, port, arguments[1])
    else:
        driver.restart(port)


def write_bad_index(driver: Driver, port: int, distance: int) -> None:
    """An index ahead of the log, or behind, seen in one step between the client's own."""
    driver.step()
    ports = driver.memory.arrays["ports"][port]
    # In a step the log grows by no more than the ring holds.
    ahead = int(ports["token_tail"]) + driver.memory.geometry.token_ring_entries + distance
    behind = int(ports["consumer_index"]) + distance
    index = ahead if distance > 0 else max(behind, 0)
    driver.links[port].write([(control_offset("consumer_index"), index.to_bytes(8, "little"))])
    driver.step()
    driver.clients[port]._write_consumer_index()


def finish(driver: Driver, end: Command) -> None:
    """Whatever was asked ends rightly, in bounded time, and leaves nothing behind."""
    asked = [asked for live in driver.live for asked in live.values()]
    driver.command(end)
    driver.run(max_steps=4000)
    assert all(request.reason != FinishReason.NONE for request in asked)
    driver.check_answers()
    driver.step()
    halted = EngineState.IDLE if end == Command.RUN else EngineState.STOPPED
    assert driver.engine_state == halted


def random_ask(rng: random.Random, num_ports: int) -> Ask:
    """Mostly short prompts with long answers, which outgrow a small pool."""
    num_prompt = rng.choice([rng.randint(1, 6), rng.randint(1, 6), rng.randint(1, 40)])
    num_biases = rng.choice([0, 0, 0, 1, 5])
    params = RequestParams(
        max_tokens=rng.randint(1, MAX_CONTEXT - num_prompt),
        min_tokens=rng.choice([0, 0, 5]),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.getrandbits(64),
        ignore_eos=rng.random() < 0.7,
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 1, 9]))),
        logit_bias=tuple(
            (rng.randrange(VOCAB_SIZE), rng.randint(-9, 9)) for _ in range(num_biases)
        ),
        num_logprobs=rng.choice([-1, -1, 0, 3, 15]),
        priority=rng.choice([0, 0, 0, -1, 1]),
    )
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_prompt))
    return Ask(rng.randrange(num_ports), params, prompt, rng.random() < 0.02)


def make_small_driver(
    ring: RingConfig, scheduler: SchedulerConfig, rng: random.Random, step: Any = None
) -> Driver:
    """With little more than the pages that the longest request needs."""
    least = -(-MAX_CONTEXT // scheduler.page_size)
    scheduler = scheduler.replace(num_pages=least + rng.randint(0, least // 2))
    return Driver(ring, scheduler, with_twin=True, step=step)


def run_random_trace(driver: Driver, rng: random.Random, num_steps: int) -> None:
    num_ports, load = len(driver.clients), rng.uniform(0.1, 0.9)
    for _ in range(num_steps):
        while rng.random() < load:
            act(driver, random_ask(rng, num_ports))
        if rng.random() < 0.05:
            act(driver, ("cancel", rng.randrange(64)))
        if rng.random() < 0.03:
            act(driver, ("index", rng.randrange(2), rng.randint(-40, 40)))
        if rng.random() < 0.01:
            act(driver, ("restart", rng.randrange(2)))
        for port in range(num_ports):  # port 1 is slow, at times
            act(driver, ("read", port, rng.choice([0, 0, 1]) if port else rng.choice([1, 9])))
        driver.step()


def main(library_path: str, num_seeds: int) -> None:
    step = ctypes.CDLL(library_path).bb_scheduler_step
    step.argtypes, step.restype = [ctypes.c_void_p], None
    for seed in range(num_seeds):
        rng = random.Random(seed)
        scheduler = SchedulerConfig(
            page_size=4, max_running=6, max_step_tokens=24, max_context=MAX_CONTEXT, debug=True
        )
        ring = RingConfig(num_slots=8, num_ports=2, token_ring_entries=16)
        driver = make_small_driver(ring, scheduler, rng, step)
        run_random_trace(driver, rng, num_steps=25)
        finish(driver, Command.RUN)
        print(f"seed {seed}: {driver.num_steps} steps")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
