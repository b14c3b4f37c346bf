"""Tokens delivered to HTTP clients: the scripted model, streams that follow one another.

    python -m loadtests.bench_http [--link vm] [--streams 32] [--seconds 10] [--url URL]

Starts a stack (unless `--url` names one), and prints one JSON object: tokens/s over all streams,
TTFT, the processor time of each role per second (so that the bottleneck shows), and the link.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from engine.stack import Stack

TEXT = "the quick brown fox jumps over the lazy dog " * 6
READY_TIMEOUT_S = 900.0
WARM_UP_S = 2.0


class Streams:
    """Streams over one URL until a deadline. `tokens` counts those that came after `begin_s`."""

    def __init__(self, url: str, begin_s: float, end_s: float) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._begin_s, self._end_s = begin_s, end_s
        self.num_tokens = 0
        self.ttft_s: list[float] = []
        body = json.dumps({"prompt": TEXT, "max_tokens": len(TEXT), "stream": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body

    async def run(self) -> None:
        """One stream after the other, over one connection."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            while time.monotonic() < self._end_s:
                await self._one(reader, writer)
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        started_s = time.monotonic()
        writer.write(self._request)
        is_first = True
        while True:
            line = await reader.readline()
            if not line:
                raise ConnectionError("the server closed the connection")
            if not line.startswith(b"data: "):
                continue
            now_s = time.monotonic()
            if line.startswith(b"data: [DONE]"):
                break
            if b'"error"' in line:
                raise RuntimeError(line.decode())
            if is_first:
                is_first = False
                if started_s >= self._begin_s:
                    self.ttft_s.append(now_s - started_s)
            if self._begin_s <= now_s < self._end_s:
                self.num_tokens += 1
        await reader.readuntil(b"0\r\n\r\n")


def cpu_s(pid: int) -> float:
    """Processor seconds of a process and its descendants."""
    root = psutil.Process(pid)
    times = [one.cpu_times() for one in (root, *root.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


async def measure(url: str, num_streams: int, seconds: float, pids: dict[str, int]) -> Any:
    """The figures."""
    begin_s = time.monotonic() + WARM_UP_S
    streams = Streams(url, begin_s, begin_s + seconds)
    tasks = [asyncio.create_task(streams.run()) for _ in range(num_streams)]
    await asyncio.sleep(WARM_UP_S)
    before = {role: cpu_s(pid) for role, pid in pids.items()}
    await asyncio.sleep(seconds)
    after = {role: cpu_s(pid) for role, pid in pids.items()}
    await asyncio.gather(*tasks)
    with urllib.request.urlopen(f"{url}/server_info", timeout=30) as response:
        info = json.load(response)
    ttft_ms = sorted(1e3 * value for value in streams.ttft_s)
    return {
        "tokens_per_s": round(streams.num_tokens / seconds, 1),
        "num_streams": num_streams,
        "ttft_p50_ms": round(statistics.median(ttft_ms), 2) if ttft_ms else None,
        "cpu_share": {role: round((after[role] - before[role]) / seconds, 3) for role in pids},
        "link": info["link"],
        "link_description": info["link_description"],
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench_http", description=__doc__)
    parser.add_argument("--link", default="shm")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--url", help="a server that runs already")
    arguments = parser.parse_args(words)
    if arguments.url:
        figures = asyncio.run(measure(arguments.url, arguments.streams, arguments.seconds, {}))
        print(json.dumps(figures))
        return 0
    flags = ["--model", "scripted", "--port", "0", "--link", arguments.link]
    flags += ["--max-running", str(arguments.streams)]
    with Stack(flags, on_message=lambda line: print(line, file=sys.stderr)) as stack:
        ready = stack.wait_ready(READY_TIMEOUT_S)
        pids = {
            "device": ready.device_pid,
            "host": ready.host_pid,
            "rnic": ready.rnic_pid,
            "smartnic": ready.smartnic_pid,
        }
        pids = {role: pid for role, pid in pids.items() if pid and Path(f"/proc/{pid}").exists()}
        figures = asyncio.run(measure(ready.url, arguments.streams, arguments.seconds, pids))
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
