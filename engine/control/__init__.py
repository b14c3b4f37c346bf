"""Control paths: who runs the scheduler, and when."""

from __future__ import annotations

from typing import Protocol

from engine.state import Command
from engine.timeline import Event


class ControlPath(Protocol):
    """One engine's loop. Whoever runs it, these words tell and ask it from the host process."""

    def start(self) -> None:
        """Let it run; returns at once."""

    def command(self, command: Command) -> None:
        """Tell it; honoured at the next step or idle poll."""

    def state(self) -> int:
        """protocol.EngineState, as it says itself."""

    def error(self) -> int:
        """state.SchedulerError: why it halted, 0 for no reason."""

    def timeline(self) -> list[Event]:
        """The last steps, for a loop that has halted; the device's own only where asked for."""
