"""A trace in real time on the simulated device, the caller being its only client, over the ring.

What a request took is read from the device's own time stamps, so the client's pace does not count.
Device and client have real-time priority where that is allowed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from emulation.cpu_split import bind, set_realtime
from engine.config import ServeConfig
from engine.handshake import Session, connect
from engine.launcher import DEVICE_MODULES
from engine.link.shm import SharedMemoryLink
from engine.ring import RequestParams, RingClient, Snapshot, Ticket
from engine.runtime_dir import RuntimeDir
from engine.workload import Floats, Requests
from loadtests.bench_ring import TimedLink, is_ready, start, wait_for

DEVICE_PRIORITY, CLIENT_PRIORITY = 10, 5
NAP_NS = 200_000
STALL_TIMEOUT_S = 20.0
DRAIN_TIMEOUT_S = 30.0
TOKEN = 65


@dataclass(frozen=True, slots=True)
class PacedRun:
    """What happened, by the device's clock; f8 each, TPOT of requests with two tokens or more."""

    requests: Requests
    """As they were sent: arrivals are when the record was written, from the first one on."""
    began_ns: int
    """When the first one was, of CLOCK_MONOTONIC."""
    ttft_ms: Floats
    tpot_ms: Floats
    tokens_per_s: float
    num_steps: int
    late_steps: int
    gap_share: float

    @property
    def late_share(self) -> float:
        """Of the steps, those that did not keep the pace."""
        return self.late_steps / max(self.num_steps, 1)


@contextlib.contextmanager
def paced_engine(config: ServeConfig) -> Iterator[Session]:
    """A device and its host; at the end the host drains, so that it writes its timeline."""
    with contextlib.ExitStack() as stack:
        runtime = stack.enter_context(RuntimeDir())
        config = config.replace(runtime_dir=str(runtime.path))
        config_path = runtime.path / "config.json"
        config_path.write_text(config.to_json())
        socket = config.device_socket
        module = DEVICE_MODULES[config.device.device]
        device = start(stack, runtime.path, "device", module, "--socket", str(socket))
        wait_for(device, socket.exists)
        host = start(stack, runtime.path, "host", "engine.host", "--config", str(config_path))
        wait_for(host, lambda: is_ready(host))
        with _apart(device.process.pid, own_cpu=config.path == "persistent"):
            yield connect(config.handshake_socket)
        host.process.terminate()
        host.process.wait(DRAIN_TIMEOUT_S)


@contextlib.contextmanager
def _apart(device_pid: int, *, own_cpu: bool) -> Iterator[None]:
    """Real-time priority for device and client; own_cpu: the device on one, the client on others.

    On one CPU the client would send when the device lets it, at the begin of a step. A device that
    a host drives has more than one thread at work, and needs more than one CPU.
    """
    cpus = os.sched_getaffinity(0)
    if own_cpu and len(cpus) > 1:
        bind(device_pid, {max(cpus)})
        os.sched_setaffinity(0, cpus - {max(cpus)})
    with contextlib.suppress(OSError):  # not allowed: the count of late steps says how it went
        set_realtime(device_pid, DEVICE_PRIORITY)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(CLIENT_PRIORITY))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.sched_setaffinity(0, cpus)


class Player:
    """Sends requests at their times and collects what the device says of each."""

    def __init__(self, session: Session) -> None:
        assert isinstance(session.link, SharedMemoryLink)
        link = session.link
        self._link = TimedLink(link.memory, link.geometry, link.info.window)
        self.client = RingClient(self._link)
        self._tickets: dict[int, tuple[Ticket, int, int, int]] = {}
        self._done: list[tuple[int, ...]] = []

    def play(self, requests: Requests) -> PacedRun:
        """All of them, to the last token; raises RuntimeError when nothing comes any more."""
        before = self.client.snapshot()
        due_ns = (requests.arrival_s * 1e9).astype(np.int64) + time.monotonic_ns()
        sent, active_ns = 0, time.monotonic_ns()
        while len(self._done) < len(requests):
            now = time.monotonic_ns()
            if now - active_ns > STALL_TIMEOUT_S * 1e9:
                raise RuntimeError(f"nothing came for {STALL_TIMEOUT_S:g} s")
            while sent < len(requests) and now >= due_ns[sent]:
                self._send(int(requests.prompt_tokens[sent]), int(requests.output_tokens[sent]))
                sent += 1
                active_ns = now = time.monotonic_ns()
            entries = self.client.read_tokens(0)
            if len(entries):
                active_ns = now
                self._collect(entries["slot"][entries["finish_reason"] != 0].tolist())
            # Not a wait for tokens: requests would be sent when steps begin, and wait longest.
            left_ns = due_ns[sent] - time.monotonic_ns() if sent < len(requests) else NAP_NS
            time.sleep(max(0, min(NAP_NS, int(left_ns))) / 1e9)
        return self._summary(before)

    def _send(self, num_prompt: int, num_output: int) -> None:
        params = RequestParams(max_tokens=num_output, ignore_eos=True)
        ticket = self.client.submit(params, [TOKEN] * num_prompt)
        self._tickets[ticket.slot] = ticket, self._link.written_ns, num_prompt, num_output

    def _collect(self, slots: Sequence[int]) -> None:
        for slot in slots:
            ticket, *asked = self._tickets.pop(slot)
            times = self.client.slot_times(slot)
            if times.num_generated != asked[-1]:
                raise RuntimeError(f"{times.num_generated} tokens came of {asked[-1]}")
            self._done.append((*asked, times.first_token_ns, times.finished_ns))
            self.client.release(ticket)

    def _summary(self, before: Snapshot) -> PacedRun:
        after = self.client.snapshot()
        sent_ns, prompt, output, first_ns, finished_ns = np.array(sorted(self._done), np.int64).T
        several = output > 1
        step_ns, gap_ns = after.step_ns - before.step_ns, after.gap_ns - before.gap_ns
        return PacedRun(
            Requests(
                (sent_ns - sent_ns[0]) / 1e9, prompt.astype(np.int32), output.astype(np.int32)
            ),
            int(sent_ns[0]),
            (first_ns - sent_ns) / 1e6,
            (finished_ns - first_ns)[several] / (output[several] - 1) / 1e6,
            float(output.sum() * 1e9 / (finished_ns.max() - sent_ns[0])),
            after.num_steps - before.num_steps,
            after.pace_late_steps - before.pace_late_steps,
            gap_ns / max(step_ns + gap_ns, 1),
        )


def play(config: ServeConfig, requests: Requests) -> PacedRun:
    """On an engine of its own."""
    with paced_engine(config) as session:
        return Player(session).play(requests)
