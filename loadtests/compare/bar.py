"""A progress bar: redrawn in place on a terminal, a line a cell elsewhere."""

from __future__ import annotations

import sys
import time

WIDTH = 24


class Bar:
    """Counts cells, and guesses the rest from the time that those before took."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._began_s = time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        self._title = ""

    def begin(self, title: str) -> None:
        """A cell begins."""
        self._title = title
        if self._is_terminal:
            filled = WIDTH * self._done // max(1, self._total)
            drawn = "█" * filled + "░" * (WIDTH - filled)
            line = f"{drawn} {self._done}/{self._total} {self._rest()} {title}"
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)

    def _rest(self) -> str:
        if not self._done:
            return ""
        rest_s = (time.monotonic() - self._began_s) / self._done * (self._total - self._done)
        return f"about {rest_s / 60:.0f} min left" if rest_s > 90 else f"about {rest_s:.0f} s left"

    def say(self, text: str) -> None:
        """A line that stays."""
        clear = "\r\x1b[2K" if self._is_terminal else ""
        print(f"{clear}{text}", file=sys.stderr, flush=True)

    def end(self, summary: str) -> None:
        """The cell ended."""
        self._done += 1
        self.say(f"[{self._done}/{self._total}] {self._title}: {summary}")
