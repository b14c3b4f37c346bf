"""The SmartNIC before a native device of a chosen pace: life, death, overload, slow clients."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from engine.config import RingConfig, SchedulerConfig, ServeConfig, SmartnicConfig
from tests.http_client import (
    CHAT,
    COMPLETIONS,
    canary,
    get,
    metrics,
    post,
    prompt_for,
    raw_request,
    receive_until,
    stream,
    wait_idle,
)
from tests.native_stack import NativeStack, start_native
from tests.server import wait_until

LONG = {"prompt": "<|sep|>abcdefgh", "ignore_eos": True}
SLOW_STEP_US = 5000


@contextlib.contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """SIGSTOP inside, SIGCONT after."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def slow_stack() -> Iterator[NativeStack]:
    """200 steps a second, 4 slots, a heartbeat timeout of 2 s."""
    with start_native(
        step_us=SLOW_STEP_US,
        ring=RingConfig(num_slots=4),
        scheduler=SchedulerConfig(max_running=4),
        smartnic=SmartnicConfig(port=0, heartbeat_timeout_s=2.0),
    ) as stack:
        yield stack


def first_events(sock: socket.socket, count: int) -> bytes:
    return receive_until(sock, lambda data: data.count(b"\n\n") >= count)


def test_a_lost_device_ends_requests_and_readiness_until_it_is_back(
    slow_stack: NativeStack,
) -> None:
    url = slow_stack.url
    body = {**LONG, "max_tokens": 2000}
    with ThreadPoolExecutor(2) as pool, stopped(slow_stack.device):
        started = time.monotonic()
        streamed = pool.submit(stream, url, COMPLETIONS, body)
        whole = pool.submit(post, url, COMPLETIONS, body)
        result, response = streamed.result(5), whole.result(5)
        assert time.monotonic() - started < 5
        assert result.status == 200
        assert [error["code"] for error in result.errors] == ["engine_lost"]
        assert result.done
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_lost"
        ready = get(url, "/readyz")
        assert ready.status_code == 503
        assert "heartbeat" in ready.json()["reason"]
        assert get(url, "/livez").status_code == 200
        refused = post(url, CHAT, prompt_for(CHAT, "x"))
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
    wait_until(lambda: get(url, "/readyz").status_code == 200, 5, "ready again")
    wait_idle(url, 5)
    canary(url)


def test_a_full_ring_is_refused_fast_and_with_retry_after(slow_stack: NativeStack) -> None:
    url = slow_stack.url
    body = {**LONG, "max_tokens": 2000, "stream": True}
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            first_events(stack.enter_context(raw_request(url, COMPLETIONS, body)), 1)
        started = time.monotonic()
        response = post(url, COMPLETIONS, {"prompt": "x" * 1000})
        assert time.monotonic() - started < 0.5
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "ring_full"
        assert response.headers["retry-after"] == "1"
        assert get(url, "/readyz").status_code == 200
    wait_idle(url)
    canary(url)


def test_more_choices_than_slots_can_never_be_served(slow_stack: NativeStack) -> None:
    response = post(slow_stack.url, COMPLETIONS, {"prompt": "x", "n": 5})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"


def test_a_client_that_does_not_read_delays_nobody() -> None:
    scheduler = SchedulerConfig(max_context=1 << 17, num_pages=1 << 14, max_running=4)
    with start_native(ring=RingConfig(num_slots=4), scheduler=scheduler) as stack:
        body = {**LONG, "max_tokens": 100_000, "stream": True}
        with raw_request(stack.url, COMPLETIONS, body) as sock:
            data = first_events(sock, 1)
            for _ in range(5):
                canary(stack.url, within_s=1.0)
            wait_until(
                lambda: metrics(stack.url)["blinkbed_ring_slots_used"] == 0,
                30,
                "the device is done although the client never read",
            )
            data += receive_until(sock, lambda received: received.endswith(b"0\r\n\r\n"))
        text = "".join(
            json.loads(line[len(b"data: ") :])["choices"][0]["text"]
            for line in data.split(b"\n")
            if line.startswith(b"data: {")
        )
        period = "abcdefgh"  # and an end of sequence, which shows nothing
        assert text == (period * 20_000)[: 100_000 - 100_000 // 9]


def test_a_long_prompt_does_not_delay_other_streams() -> None:
    scheduler = SchedulerConfig(max_context=1 << 17, num_pages=1 << 14, max_running=4)
    with start_native(step_us=500, ring=RingConfig(num_slots=4), scheduler=scheduler) as stack:
        arrivals: list[float] = []
        with raw_request(stack.url, COMPLETIONS, {**LONG, "max_tokens": 3000, "stream": True}) as s:
            reader = threading.Thread(target=note_arrivals, args=(s, arrivals))
            reader.start()
            post(stack.url, COMPLETIONS, {"prompt": "x" * 120_000, "max_tokens": 1})
            reader.join()
        gaps = [b - a for a, b in itertools.pairwise(arrivals)]
        assert max(gaps) < 0.25


def note_arrivals(sock: socket.socket, arrivals: list[float]) -> None:
    """When data came, until the response ends."""
    tail = b""
    while not tail.endswith(b"0\r\n\r\n"):
        tail = (tail + sock.recv(65536))[-64:]
        arrivals.append(time.monotonic())


def test_nothing_is_polled_when_idle() -> None:
    with start_native() as stack:
        canary(stack.url)
        wait_idle(stack.url)
        threads = Path(f"/proc/{stack.smartnic.pid}/task")
        poller = next(t for t in threads.iterdir() if is_poller(t, stack))

        def sleeps() -> bool:
            before = voluntary_switches(poller)
            for _ in range(20):
                get(stack.url, "/livez")
            return voluntary_switches(poller) == before

        wait_until(sleeps, 5, "the poller waits while other requests are served")


def is_poller(thread: Path, stack: NativeStack) -> bool:
    """The one thread that wakes while a request runs, besides the first."""
    if thread.name == str(stack.smartnic.pid):
        return False
    before = voluntary_switches(thread)
    post(stack.url, COMPLETIONS, {**LONG, "max_tokens": 1000})
    wait_idle(stack.url)
    return voluntary_switches(thread) > before


def voluntary_switches(thread: Path) -> int:
    """How often a thread has gone to sleep."""
    for line in (thread / "status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches"):
            return int(line.split()[1])
    raise AssertionError("no context switches in /proc")


def test_sigterm_lets_running_requests_end_and_refuses_new_ones() -> None:
    with start_native(step_us=SLOW_STEP_US) as stack:
        body = {**LONG, "max_tokens": 200}
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(stream, stack.url, COMPLETIONS, body)
            wait_until(lambda: metrics(stack.url)["blinkbed_ring_slots_used"] == 1, 5, "it runs")
            stack.smartnic.send_signal(signal.SIGTERM)
            wait_until(lambda: get(stack.url, "/readyz").status_code == 503, 5, "draining")
            refused = post(stack.url, COMPLETIONS, {"prompt": "x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert get(stack.url, "/livez").status_code == 200
            result = running.result(30)
        assert result.done
        assert result.finish_reasons() == ["length"]
        assert stack.smartnic.wait(10) == 0


def test_a_drain_ends_at_its_deadline() -> None:
    smartnic = SmartnicConfig(port=0, drain_timeout_s=0.5)
    with start_native(step_us=SLOW_STEP_US, smartnic=smartnic) as stack:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(stream, stack.url, COMPLETIONS, {**LONG, "max_tokens": 2000})
            wait_until(lambda: metrics(stack.url)["blinkbed_ring_slots_used"] == 1, 5, "it runs")
            stack.smartnic.send_signal(signal.SIGTERM)
            result = running.result(10)
        assert [error["code"] for error in result.errors] == ["draining"]
        assert result.done
        assert stack.smartnic.wait(10) == 0


def test_a_taken_port_gives_one_clear_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = ServeConfig(smartnic=SmartnicConfig(port=port), runtime_dir=str(tmp_path))
        path = tmp_path / "config.json"
        path.write_text(config.to_json())
        command = [sys.executable, "-m", "engine.smartnic", "--config", str(path)]
        environment = {k: v for k, v in os.environ.items() if k != "BLINKBED_PROGRESS_FD"}
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=30, env=environment, check=False
        )
    assert ended.returncode != 0
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_restarted_smartnic_takes_the_ring_over() -> None:
    with start_native(step_us=SLOW_STEP_US, ring=RingConfig(num_slots=4)) as stack:
        body: dict[str, Any] = {**LONG, "max_tokens": 2000, "stream": True}
        with contextlib.ExitStack() as sockets:
            for _ in range(4):
                first_events(sockets.enter_context(raw_request(stack.url, COMPLETIONS, body)), 1)
            stack.smartnic.kill()
            stack.smartnic.wait()
        parts = urlsplit(stack.url)
        config_path = stack.log_path.with_name("config.json")
        config = ServeConfig.from_json(config_path.read_text())
        config = config.replace(smartnic=config.smartnic.replace(port=parts.port))
        config_path.write_text(config.to_json())
        command = [sys.executable, "-m", "engine.smartnic", "--config", str(config_path)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as second:
            try:
                wait_until(lambda: is_ready(stack.url), 20, "the second SmartNIC is ready")
                wait_idle(stack.url)
                canary(stack.url)
            finally:
                second.kill()


def is_ready(url: str) -> bool:
    try:
        return get(url, "/readyz").status_code == 200
    except httpx.TransportError:
        return False
