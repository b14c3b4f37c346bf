"""A stack seen from outside: ``blinkbed serve`` as a child of the demo, a load test or a test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, Self

from engine.child import die_with
from engine.errors import UserError
from engine.ready import ReadyLine

STOP_TIMEOUT_S = 60.0


class StackError(UserError):
    """The stack did not start; the message is the launcher's own sentence where it gave one."""


class Stack:
    """Starts a launcher and waits for its ready line; a context manager that stops it.

    words: arguments of ``blinkbed serve``. on_message: called with each line that the launcher
    writes to stderr, from a thread. environment: added to ours. launcher: another command to
    start. Raises StackError from ``wait_ready``. ``ready`` is the parsed line once it is there.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        on_message: Callable[[str], None] | None = None,
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (sys.executable, "-m", "engine.cli", "serve"),
    ) -> None:
        self.messages: list[str] = []
        self.ready: ReadyLine | None = None
        self._on_message = on_message
        self._has_answered = threading.Event()
        self.process = subprocess.Popen(
            [*launcher, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            process_group=0,
            preexec_fn=die_with(os.getpid()),
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read_stdout, args=(self.process.stdout,), daemon=True),
            threading.Thread(target=self._read_stderr, args=(self.process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_stdout(self, lines: IO[str]) -> None:
        for line in lines:
            try:
                self.ready = ReadyLine.from_line(line)
            except ValueError:
                continue
            self._has_answered.set()
        self._has_answered.set()

    def _read_stderr(self, lines: IO[str]) -> None:
        for line in lines:
            self.messages.append(line.rstrip("\n"))
            if self._on_message is not None:
                self._on_message(line.rstrip("\n"))

    def wait_ready(self, timeout_s: float) -> ReadyLine:
        """The ready line; raises StackError when the launcher ends or the time is up."""
        self._has_answered.wait(timeout_s)
        if self.ready is None:
            is_late = self.process.poll() is None and not self._has_answered.is_set()
            self.close()
            if is_late:
                raise StackError(f"the server was not ready within {timeout_s:.0f} s")
            self._readers[1].join(5.0)
            reason = self.messages[-1] if self.messages else "no message"
            raise StackError(reason.removeprefix("blinkbed: "))
        return self.ready

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM, wait for the drain, return the launcher's exit status (killed: negative)."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
        status = self.process.wait()
        for reader in self._readers:
            reader.join(5.0)
        return status

    def close(self) -> None:
        """Stop if it still runs; idempotent."""
        self.stop()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
