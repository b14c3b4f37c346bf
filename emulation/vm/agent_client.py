"""The host's end of a guest's agent: programs in the guest as objects."""

from __future__ import annotations

import base64
import json
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ANSWER_TIMEOUT_S = 30.0
CHUNK_BYTES = 256 << 10


class AgentError(Exception):
    """The agent refused, or did not answer."""


class GuestProcess:
    """A program in a guest. Its output (both streams) comes line by line."""

    def __init__(self, agent: AgentClient, argv: Sequence[str]) -> None:
        self.argv = list(argv)
        self.pid = 0
        self.status: int | None = None
        """Exit status once it has ended; negative: the signal that ended it."""
        self._agent = agent
        self._condition = threading.Condition()
        self._text = ""
        self._read_to = 0

    def _on_output(self, text: str) -> None:
        with self._condition:
            self._text += text
            self._condition.notify_all()

    def _on_exit(self, status: int) -> None:
        with self._condition:
            self.status = status
            self._condition.notify_all()

    @property
    def output(self) -> str:
        """All that it has said so far."""
        with self._condition:
            return self._text

    def read_line(self, timeout_s: float) -> str:
        """The next whole line; raises AgentError when none comes in time or it has ended."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while True:
                end = self._text.find("\n", self._read_to)
                if end >= 0:
                    line = self._text[self._read_to : end]
                    self._read_to = end + 1
                    return line
                left = deadline - time.monotonic()
                if self.status is not None or left <= 0:
                    raise AgentError(f"{self._how()}; last output: {self._text[-2000:]}")
                self._condition.wait(left)

    def _how(self) -> str:
        name = " ".join(self.argv[:4])
        if self.status is None:
            return f"{name} says nothing more"
        return f"{name} ended with status {self.status}"

    def wait(self, timeout_s: float) -> int:
        """Its exit status; raises AgentError if it still runs after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while self.status is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise AgentError(
                        f"{self._how()} for {timeout_s:g} s; last output: {self._text[-2000:]}"
                    )
                self._condition.wait(left)
            return self.status

    def check(self, timeout_s: float) -> str:
        """Its whole output; raises AgentError unless it ends with status 0 in time."""
        if self.wait(timeout_s) != 0:
            raise AgentError(f"{self._how()}: {self.output[-4000:]}")
        return self.output

    def signal(self, number: int) -> None:
        """Send a signal to it and its children."""
        self._agent.call("signal", pid=self.pid, signal=int(number))

    def write(self, text: str) -> None:
        """Text for its standard input; the empty text closes that."""
        self._agent.call("input", pid=self.pid, data=text)


class AgentClient:
    """One guest's agent over the Unix socket of its virtio-serial port. A context manager."""

    def __init__(self, path: Path, *, timeout_s: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        self._socket.connect(str(path))
        self._socket.settimeout(None)
        self._send_lock = threading.Lock()
        self._next_id = 0
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._processes: dict[int, GuestProcess] = {}
        self._early: dict[int, list[dict[str, Any]]] = {}
        self._table_lock = threading.Lock()
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read, name="guest-agent", daemon=True)
        self._reader.start()

    def call(self, op: str, *, timeout_s: float = ANSWER_TIMEOUT_S, **arguments: Any) -> Any:
        """The answer to one message; raises AgentError."""
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._send_lock:
            self._next_id += 1
            number = self._next_id
            self._answers[number] = answers
            line = json.dumps({"id": number, "op": op, **arguments}).encode() + b"\n"
            try:
                self._socket.sendall(line)
            except OSError as error:
                raise AgentError(f"the guest's agent is gone: {error}") from error
        try:
            answer = answers.get(timeout=timeout_s)
        except queue.Empty:
            raise AgentError(f"the guest did not answer {op} within {timeout_s:g} s") from None
        finally:
            self._answers.pop(number, None)
        if "error" in answer:
            raise AgentError(f"{op} in the guest: {answer['error']}")
        return answer

    def start(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str = "/root"
    ) -> GuestProcess:
        """Start a program."""
        process = GuestProcess(self, argv)
        answer = self.call("start", argv=list(argv), env=dict(env or {}), cwd=cwd)
        process.pid = answer["pid"]
        with self._table_lock:
            self._processes[process.pid] = process
            early = self._early.pop(process.pid, [])
            for message in early:
                self._deliver(process, message)
        return process

    def run(self, argv: Sequence[str], *, timeout_s: float = 60.0) -> str:
        """Run a program to its end; its output. Raises AgentError unless its status is 0."""
        return self.start(argv).check(timeout_s)

    def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file in the guest."""
        for start in range(0, max(len(data), 1), CHUNK_BYTES):
            part = base64.b64encode(data[start : start + CHUNK_BYTES]).decode()
            self.call("put", path=path, data=part, mode=mode, append=start > 0)

    def get(self, path: str) -> bytes:
        """A file of the guest."""
        return base64.b64decode(self.call("get", path=path)["data"])

    def facts(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """uptime_s, kernel, link_state; window_bytes and window_offset where there is one."""
        answer: dict[str, Any] = self.call("facts", timeout_s=timeout_s)
        return answer

    def _read(self) -> None:
        pending = b""
        while True:
            try:
                data = self._socket.recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                break
            pending += data
            *lines, pending = pending.split(b"\n")
            for line in lines:
                self._handle(json.loads(line))
        self._closed.set()
        for answers in list(self._answers.values()):
            answers.put({"error": "the guest has ended"})
        with self._table_lock:
            for process in self._processes.values():
                if process.status is None:
                    process._on_exit(-9)

    def _handle(self, message: dict[str, Any]) -> None:
        if "event" not in message:
            answers = self._answers.get(message["id"])
            if answers is not None:
                answers.put(message)
            return
        with self._table_lock:
            process = self._processes.get(message["pid"])
            if process is None:  # it spoke before the answer to `start` was read
                self._early.setdefault(message["pid"], []).append(message)
            else:
                self._deliver(process, message)

    def _deliver(self, process: GuestProcess, message: dict[str, Any]) -> None:
        if message["event"] == "output":
            process._on_output(message["text"])
        else:
            process._on_exit(message["status"])
            self._processes.pop(process.pid, None)  # the guest may give the number again

    def close(self) -> None:
        """Let go of the guest; idempotent. Its programs go on."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()
        self._reader.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
