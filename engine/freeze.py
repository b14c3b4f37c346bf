"""Holding processes still with SIGSTOP, and proving by /proc that they stand still."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from engine.errors import UserError

STOP_TIMEOUT_S = 5.0


class FreezeError(UserError):
    """A process could not be stopped."""


def process_state(pid: int) -> str:
    """The state letter of a process in /proc ("T" is stopped), or "" when it is gone."""
    return _state_in(Path(f"/proc/{pid}/stat"))


def thread_states(pid: int) -> list[str]:
    """The state letters of all threads of a process."""
    return [_state_in(path) for path in Path(f"/proc/{pid}/task").glob("*/stat")]


def _state_in(stat: Path) -> str:
    try:
        return stat.read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""


@dataclasses.dataclass(slots=True)
class Freeze:
    """Processes held by SIGSTOP; a context manager that always lets them go on.

    After ``__enter__`` every one of them is in state T; raises FreezeError when one is not within
    the deadline. ``began_at`` and ``ended_at`` are monotonic seconds and bound the time in which
    all of them surely stood still.
    """

    pids: Sequence[int]
    began_at: float = 0.0
    ended_at: float = 0.0

    def __enter__(self) -> Self:
        try:
            for pid in self.pids:
                os.kill(pid, signal.SIGSTOP)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while not self.holds():
                if time.monotonic() > deadline:
                    raise FreezeError(f"processes {list(self.pids)} did not stop at SIGSTOP")
                time.sleep(0.002)
        except OSError as error:
            self._thaw()
            raise FreezeError(f"cannot stop processes {list(self.pids)}: {error}") from None
        except FreezeError:
            self._thaw()
            raise
        self.began_at = time.monotonic()
        return self

    def holds(self) -> bool:
        """Whether all of them are in state T now."""
        return all(process_state(pid) == "T" for pid in self.pids)

    def _thaw(self) -> None:
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except OSError:
                pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ended_at = time.monotonic()
        self._thaw()
