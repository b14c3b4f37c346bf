"""How a child process tells the launcher what it is doing: one JSON object a line.

The launcher passes the writing end of a pipe by number in ``BLINKBED_PROGRESS_FD``. Each line
is ``{"event": "progress" | "ready" | "error", "message": str, ...}``; further keys are facts
for the ready line and for reports (``window``, ``weights_bytes``, ``url``, ...). A child reports
any number of ``progress`` lines, then exactly one ``ready``, or one ``error`` before it ends.
Without a launcher the messages go to stderr, so that every child also runs by hand.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from engine.errors import UserError

Event = Literal["progress", "ready", "error"]
Fact = str | int | float | bool | None

PROGRESS_FD_VARIABLE = "BLINKBED_PROGRESS_FD"


@dataclass(frozen=True, slots=True)
class Report:
    """One line of a child's progress."""

    event: Event
    message: str
    facts: dict[str, Fact] = field(default_factory=dict)

    def to_line(self) -> str:
        """The report as one line of JSON, newline included."""
        return json.dumps({"event": self.event, "message": self.message, **self.facts}) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Report:
        """Parse one line; raises ValueError for anything that is not a report."""
        fields = json.loads(line)
        if not isinstance(fields, dict):
            raise ValueError(f"not a report: {line!r}")
        event, message = fields.pop("event", None), fields.pop("message", None)
        if event not in ("progress", "ready", "error") or not isinstance(message, str):
            raise ValueError(f"not a report: {line!r}")
        return cls(event, message, fields)


def report(event: Event, message: str, **facts: Fact) -> None:
    """Send one report to the launcher, or to stderr when nobody launched this process.

    Never raises and never blocks for ever: a launcher that is gone or stopped must not stop a
    child, so the pipe is non-blocking and a report that does not fit is dropped.
    """
    entry = Report(event, message, dict(facts))
    number = os.environ.get(PROGRESS_FD_VARIABLE)
    if number is None:
        print(f"{event}: {message}", file=sys.stderr, flush=True)
        return
    try:
        os.write(int(number), entry.to_line().encode())
    except (OSError, ValueError):
        pass


def is_launched() -> bool:
    """Whether a launcher listens."""
    return PROGRESS_FD_VARIABLE in os.environ


def progress(message: str, **facts: Fact) -> None:
    """Say what is being done now, e.g. ``progress("loading weights", fraction=0.4)``."""
    report("progress", message, **facts)


def ready(message: str, **facts: Fact) -> None:
    """Say that this process does its job from now on."""
    report("ready", message, **facts)


def run_child(main: Callable[[], int], *, debug: bool = False) -> int:
    """Run a child's ``main`` and turn an exception into one error report and exit status 1.

    A UserError's sentence is reported as it is; anything else is named with its type. With
    ``debug`` the traceback goes to stderr as well.
    """
    try:
        return main()
    except Exception as error:
        report("error", sentence_of(error))
        if debug:
            traceback.print_exc()
        return 1


def sentence_of(error: Exception) -> str:
    """What to tell the user of an exception."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}" if str(error) else "not enough memory"
    return f"internal error, {type(error).__name__}: {error} (--debug shows where)"
