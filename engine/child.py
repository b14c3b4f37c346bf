"""One child process of the launcher: started, listened to, and ended within a deadline."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engine.freeze import process_state, thread_states
from engine.progress import PROGRESS_FD_VARIABLE, Report

PR_SET_PDEATHSIG = 1  # prctl(2)
RESUME_TIMEOUT_S = 0.5
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class Child:
    """A process that dies with the launcher and reports over a pipe (engine.progress).

    It has a process group of its own, so that Ctrl-C in the terminal reaches the launcher alone,
    which then drains in order. Its output goes to ``log_path``, or to our stderr where that is
    None. ``close`` is idempotent and ends the process if it still runs.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log_path: Path | None,
        environment: Mapping[str, str],
        inherit: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.ready: Report | None = None
        self.failure: Report | None = None
        self.is_silent = False
        """Whether it can report no more: the writing end of its pipe is closed."""
        self._log_path = log_path
        self._partial = b""
        self.report_fd, writing_end = os.pipe()
        # The pipe never blocks a child: the launcher may be stopped while children go on.
        os.set_blocking(self.report_fd, False)
        os.set_blocking(writing_end, False)
        log = None if log_path is None else log_path.open("ab", buffering=0)
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2 if log is None else log,
                stderr=log,
                env={**environment, PROGRESS_FD_VARIABLE: str(writing_end)},
                pass_fds=(writing_end, *inherit),
                process_group=0,
                preexec_fn=die_with(os.getpid()),
            )
        except BaseException:
            os.close(self.report_fd)
            raise
        finally:
            os.close(writing_end)
            if log is not None:
                log.close()
        self.pid = self.process.pid
        self.death_fd = os.pidfd_open(self.pid)
        self.started_at = time.monotonic()
        self._closed = False

    def read_reports(self) -> list[Report]:
        """Reports that have come since the last call; what is not a report is left out."""
        while not self.is_silent:
            try:
                data = os.read(self.report_fd, 65536)
            except BlockingIOError:
                break
            if not data:
                self.is_silent = True
                break
            self._partial += data
        *lines, self._partial = self._partial.split(b"\n")
        reports = []
        for line in lines:
            try:
                entry = Report.from_line(line.decode())
            except ValueError:
                continue
            if entry.event == "ready":
                self.ready = entry
            elif entry.event == "error":
                self.failure = entry
            reports.append(entry)
        return reports

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal, waking a stopped process first so that it can act on it.

        A signal that is pending while threads come back from a stop may be taken by any of them,
        and Python's main thread, asleep in a lock, would not learn of it. So it is sent only when
        they are all back.
        """
        if not self.is_running:
            return
        if process_state(self.pid) == "T":
            self.process.send_signal(signal.SIGCONT)
            deadline = time.monotonic() + RESUME_TIMEOUT_S
            while not set(thread_states(self.pid)) <= {"S"} and time.monotonic() < deadline:
                time.sleep(0.002)
        self.process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; whether it came in time."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_words(self) -> str:
        """Why it ended, as well as can be told, in a few words."""
        self.read_reports()
        if self.failure is not None:
            return self.failure.message
        code = self.process.poll()
        how = "did not answer"
        if code is not None:
            how = f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        last_line = self._last_log_line()
        return f"{how}: {last_line}" if last_line else how

    def _last_log_line(self) -> str:
        if self._log_path is None:
            return ""
        try:
            with self._log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1].strip() if lines else ""

    def close(self) -> None:
        """End the process at once if it still runs, reap it, and close the pipe."""
        if self._closed:
            return
        self._closed = True
        if self.is_running:
            self.process.kill()
        self.process.wait()
        os.close(self.report_fd)
        os.close(self.death_fd)


def die_with(parent_pid: int) -> Callable[[], None]:
    """What runs between fork and exec: the kernel is asked for SIGKILL when the parent dies."""

    def ask() -> None:
        if _prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            os._exit(126)
        if os.getppid() != parent_pid:  # it died before prctl
            os._exit(126)

    return ask
