"""Real servers for tests: a whole stack of processes on a free port."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from engine.ready import ReadyLine
from engine.stack import Stack

READY_TIMEOUT_S = 300.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Server:
    """A running stack: where it listens, its processes, and what it has said."""

    url: str
    ready: ReadyLine
    stack: Stack

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by role, as at the start."""
        ready = self.ready
        return {
            "launcher": ready.launcher_pid,
            "device": ready.device_pid,
            "host": ready.host_pid,
            "smartnic": ready.smartnic_pid,
        }

    @property
    def log(self) -> list[str]:
        """Lines that the launcher has written to stderr."""
        return self.stack.messages


def flag_words(flags: Mapping[str, object]) -> list[str]:
    """``num_pages=8, chunked_prefill=False`` as command-line words."""
    words = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if value is True:
            words.append(f"--{flag}")
        elif value is False:
            words.append(f"--no-{flag}")
        else:
            words.append(f"--{flag}={value}")
    return words


@contextmanager
def start_server(
    *, environment: Mapping[str, str] | None = None, **flags: object
) -> Iterator[Server]:
    """Start ``blinkbed serve`` with these flags and a free port; stop it at the end."""
    words = flag_words({"port": 0, "model": "scripted", **flags})
    with Stack(words, environment=environment) as stack:
        ready = stack.wait_ready(READY_TIMEOUT_S)
        yield Server(ready.url, ready, stack)


def wait_until(
    condition: Callable[[], T | None], timeout_s: float, what: str, interval_s: float = 0.02
) -> T:
    """Poll until the condition gives something true, and return that; fail after the timeout."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(interval_s)


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def processes_naming(text: str) -> list[int]:
    """Ids of other processes that have this text in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        pid = int(path.parent.name)
        if text in command and pid != os.getpid():
            found.append(pid)
    return found
