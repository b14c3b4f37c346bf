"""How fast the SmartNIC streams: tokens/s through HTTP and its CPU time per token.

``python -m loadtests.bench_smartnic``: starts a stack with the scripted model, holds 64 streams
open with a client that does next to nothing (one epoll loop that counts event ends), and reads
the SmartNIC's CPU time from /proc. With ``--url`` and ``--pid`` a running stack is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from engine.stack import Stack

READY_TIMEOUT_S = 120.0
RECEIVE_BYTES = 1 << 18
EVENT_END = b"\n\n"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Result:
    """What one run gave."""

    num_streams: int
    num_tokens: int
    seconds: float
    tokens_per_s: float
    cpu_us_per_token: float


class Stream:
    """One streamed request on a socket of its own, read without being parsed."""

    def __init__(self, address: tuple[str, int], body: bytes) -> None:
        self.num_events = 0
        self._last = b""
        self._tail = b""
        self.socket = socket.create_connection(address)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.socket.sendall(head.encode() + body)
        self.socket.setblocking(False)

    def read(self) -> bool:
        """Take what is there; False at the end of the response."""
        data = self.socket.recv(RECEIVE_BYTES)
        if not data:
            return False
        self.num_events += data.count(EVENT_END)
        if self._last == b"\n" and data[:1] == b"\n":
            self.num_events += 1
        self._last = data[-1:]
        self._tail = (self._tail + data)[-64:]
        return True

    @property
    def is_whole(self) -> bool:
        """Whether the response ended as it should."""
        return b"[DONE]" in self._tail


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def measure(url: str, pid: int, num_streams: int, tokens_per_stream: int) -> Result:
    """Run all streams at once to their ends; raises RuntimeError if one is cut."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    body = json.dumps(
        {
            "prompt": "<|sep|>the quick brown fox jumps over the lazy dog ",
            "max_tokens": tokens_per_stream,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    selector = selectors.DefaultSelector()
    cpu_before_s, started = cpu_seconds(pid), time.perf_counter()
    streams = [Stream((parts.hostname, parts.port), body) for _ in range(num_streams)]
    for stream in streams:
        selector.register(stream.socket, selectors.EVENT_READ, stream)
    num_open = num_streams
    while num_open:
        for key, _ in selector.select():
            if not key.data.read():
                selector.unregister(key.fileobj)
                key.data.socket.close()
                num_open -= 1
    seconds = time.perf_counter() - started
    cpu_s = cpu_seconds(pid) - cpu_before_s
    if not all(stream.is_whole for stream in streams):
        raise RuntimeError("a stream ended without [DONE]")
    num_tokens = sum(stream.num_events - 1 for stream in streams)
    return Result(
        num_streams=num_streams,
        num_tokens=num_tokens,
        seconds=round(seconds, 3),
        tokens_per_s=round(num_tokens / seconds, 1),
        cpu_us_per_token=round(cpu_s / num_tokens * 1e6, 2),
    )


def best_of(url: str, pid: int, num_runs: int, num_streams: int, tokens_per_stream: int) -> Result:
    """The fastest of several runs after a short one to warm up."""
    measure(url, pid, num_streams, 16)
    runs = [measure(url, pid, num_streams, tokens_per_stream) for _ in range(num_runs)]
    return max(runs, key=lambda run: run.tokens_per_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a running stack with the scripted model")
    parser.add_argument("--pid", type=int, help="process id of its SmartNIC")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1500, help="of each stream")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    sizes = (arguments.runs, arguments.streams, arguments.tokens)
    if arguments.url:
        result = best_of(arguments.url, arguments.pid, *sizes)
    else:
        words = ["--model=scripted", "--port=0", "--num-pages=16384"]
        words += [f"--max-running={arguments.streams}", f"--ring-slots={arguments.streams}"]
        with Stack(words) as stack:
            ready = stack.wait_ready(READY_TIMEOUT_S)
            result = best_of(ready.url, ready.smartnic_pid, *sizes)
    print(json.dumps(asdict(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
