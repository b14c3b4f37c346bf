"""The one line on stdout that says a stack serves: ``ready: key=value ...``."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass

PREFIX = "ready:"


@dataclass(frozen=True, slots=True)
class ReadyLine:
    """What a person or a program needs to know of a running stack; pids by role."""

    url: str
    model: str
    device: str
    link: str
    window: str
    path: str
    launcher_pid: int
    device_pid: int
    """The host's, where the GPU is real: its loop lives in that process's CUDA context."""
    host_pid: int
    smartnic_pid: int
    rnic_pid: int = 0
    """0 where the link has no RNIC of its own (shm)."""

    def to_line(self) -> str:
        """The line, without newline; values are quoted as a shell would need it."""
        words = (f"{key}={shlex.quote(str(value))}" for key, value in asdict(self).items())
        return f"{PREFIX} {' '.join(words)}"

    @classmethod
    def from_line(cls, line: str) -> ReadyLine:
        """Parse; raises ValueError for any other line."""
        if not line.startswith(PREFIX):
            raise ValueError(f"not a ready line: {line!r}")
        words = shlex.split(line.removeprefix(PREFIX))
        values = dict(word.split("=", 1) for word in words)
        pids = {key: int(value) for key, value in values.items() if key.endswith("_pid")}
        try:
            return cls(**{**values, **pids})  # type: ignore[arg-type]
        except TypeError as error:
            raise ValueError(f"not a ready line: {line!r}: {error}") from None
