"""Health over HTTP: green while prompts are long, red when the device is gone."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.http_client import COMPLETIONS, get, metrics, post, stream
from tests.server import start_server, wait_until

LARGE: dict[str, Any] = {"max_context": 1 << 19, "num_pages": 1 << 16}


def test_a_killed_device_is_seen_and_requests_end() -> None:
    with start_server(ring_slots=4, **LARGE) as server:
        url = server.url
        body = {"prompt": "<|sep|>abc", "max_tokens": 500_000, "ignore_eos": True}
        with ThreadPoolExecutor(2) as pool:
            streamed = pool.submit(stream, url, COMPLETIONS, body)
            whole = pool.submit(post, url, COMPLETIONS, body)
            wait_until(lambda: metrics(url)["blinkbed_num_requests_running"] == 2, 5, "both run")
            os.kill(server.pids["device"], signal.SIGKILL)
            killed = time.monotonic()
            wait_until(lambda: get(url, "/readyz").status_code == 503, 5, "not ready")
            result, response = streamed.result(10), whole.result(10)
            assert time.monotonic() - killed < 5
        assert [error["code"] for error in result.errors] == ["engine_lost"]
        assert result.done
        assert response.status_code == 503
        assert get(url, "/readyz").json()["reason"]
        assert get(url, "/livez").status_code == 200
        refused = post(url, COMPLETIONS, {"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_lost")


def test_health_stays_green_under_long_prompts() -> None:
    with start_server(ring_slots=8, max_running=4, **LARGE) as server:
        url = server.url
        body = {"prompt": "x" * 400_000, "max_tokens": 1}
        with ThreadPoolExecutor(8) as pool:
            requests = [pool.submit(post, url, COMPLETIONS, body) for _ in range(8)]
            while not all(request.done() for request in requests):
                started = time.monotonic()
                assert get(url, "/livez").status_code == 200
                assert get(url, "/readyz").status_code == 200
                assert time.monotonic() - started < 1.0
        assert all(request.result().status_code == 200 for request in requests)


def test_a_long_step_is_not_taken_for_a_lost_device() -> None:
    """A whole prompt in one step takes longer than the heartbeat's limit; the pass itself beats."""
    flags: dict[str, Any] = {
        "chunked_prefill": False,
        "max_step_tokens": 2048,
        "heartbeat_timeout_s": 0.7,
    }
    with start_server(model="smollm2", **flags) as server:
        body = {"prompt": [100 + i % 900 for i in range(2040)], "max_tokens": 2, "temperature": 0}
        started = time.monotonic()
        response = post(server.url, COMPLETIONS, body)
        assert response.status_code == 200, response.text
        assert time.monotonic() - started > 0.7
