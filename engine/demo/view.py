"""How the running answers are shown: panes in a terminal, plain lines anywhere else."""

from __future__ import annotations

import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Sequence
from typing import Protocol

from engine.demo.stream import ChatStream

BOLD, DIM, CYAN, RESET = "\x1b[1m", "\x1b[2m", "\x1b[36;1m", "\x1b[0m"
MIN_COLUMNS_FOR_TWO = 100
MIN_PANE_LINES, MAX_PANE_LINES = 2, 6


class View(Protocol):
    """What the demo tells a view."""

    def say(self, message: str) -> None:
        """A line that stays."""

    def draw(self, status: str) -> None:
        """Show how far the answers are; called some times a second."""

    def end(self) -> None:
        """Show what is left; nothing more will come."""


def make_view(streams: Sequence[ChatStream]) -> View:
    """Panes where stdout is a terminal with room for them, else plain lines."""
    columns, rows = shutil.get_terminal_size()
    if sys.stdout.isatty():
        num_across = 2 if columns >= MIN_COLUMNS_FOR_TWO else 1
        num_down = -(-len(streams) // num_across)
        num_lines = min(MAX_PANE_LINES, (rows - 3) // num_down - 1)
        if num_lines >= MIN_PANE_LINES and columns >= 40:
            return Panes(streams, num_across, num_lines, columns // num_across - 1)
    return PlainLines(streams)


class PlainLines:
    """Each answer's text, a numbered line whenever enough for one is there."""

    WIDTH = 88

    def __init__(self, streams: Sequence[ChatStream]) -> None:
        self._streams = streams
        self._shown = [0] * len(streams)

    def say(self, message: str) -> None:
        """Print the message."""
        print(message, flush=True)

    def draw(self, status: str) -> None:
        """Print whole lines that have come since the last time."""
        for number, stream in enumerate(self._streams):
            while (length := self._line_length(stream.text[self._shown[number] :])) > 0:
                self._print(number, length)

    def end(self) -> None:
        """Print what is left of every answer."""
        for number, stream in enumerate(self._streams):
            self._print(number, len(stream.text) - self._shown[number])

    def _line_length(self, text: str) -> int:
        if len(text) < self.WIDTH:
            return 0
        return text.rfind(" ", 1, self.WIDTH) + 1 or self.WIDTH

    def _print(self, number: int, length: int) -> None:
        start = self._shown[number]
        line = printable(self._streams[number].text[start : start + length]).strip()
        self._shown[number] += length
        if line:
            print(f"[{number + 1}] {line}", flush=True)


class Panes:
    """A block of panes at the bottom of the terminal, redrawn in place; messages go above it."""

    def __init__(
        self, streams: Sequence[ChatStream], num_across: int, num_lines: int, width: int
    ) -> None:
        self._streams = streams
        self._num_across = num_across
        self._num_lines = num_lines
        self._width = width
        self._num_drawn = 0
        self._status = ""

    def say(self, message: str) -> None:
        """Print the message above the panes."""
        self._erase()
        sys.stdout.write(message + "\n")
        self.draw(self._status)

    def draw(self, status: str) -> None:
        """Draw the panes again, where they were."""
        self._status = status
        lines = self._lines()
        lines.append(f"{CYAN}{fit(status, self._width * self._num_across)}{RESET}")
        up = f"\x1b[{self._num_drawn}A" if self._num_drawn else ""
        sys.stdout.write("\x1b[?2026h" + up + "".join(f"\r\x1b[2K{line}\n" for line in lines))
        sys.stdout.write("\x1b[?2026l")
        sys.stdout.flush()
        self._num_drawn = len(lines)

    def end(self) -> None:
        """The last picture stays."""
        self.draw(self._status)
        self._num_drawn = 0

    def _erase(self) -> None:
        if self._num_drawn:
            sys.stdout.write(f"\x1b[{self._num_drawn}A\r\x1b[J")
            self._num_drawn = 0

    def _lines(self) -> list[str]:
        lines = []
        for start in range(0, len(self._streams), self._num_across):
            numbers = range(start, min(start + self._num_across, len(self._streams)))
            panes = [self._pane(number) for number in numbers]
            lines += [" ".join(parts) for parts in zip(*panes, strict=True)]
        return lines

    def _pane(self, number: int) -> list[str]:
        stream = self._streams[number]
        state = stream.finish_reason or ("failed" if stream.error else "...")
        title = fit(f"{number + 1} {stream.prompt}", self._width - 18)
        head = f"{BOLD}{title}{RESET}{DIM}{stream.num_tokens:>6} tok {state:>7}{RESET}"
        text = printable(stream.error or stream.text)
        wrapped = textwrap.wrap(text, self._width - 2, break_on_hyphens=False)
        shown = wrapped[-self._num_lines :]
        shown += [""] * (self._num_lines - len(shown))
        return [head, *(f"  {fit(line, self._width - 2)}" for line in shown)]


def printable(text: str) -> str:
    """The text on one line, without control characters that could move the cursor."""
    spaced = " ".join(text.split())
    return "".join(char for char in spaced if not unicodedata.category(char).startswith("C"))


def fit(text: str, width: int) -> str:
    """The text cut or padded to a width in terminal cells (wide characters take two)."""
    cells = 0
    for position, char in enumerate(text):
        cell = 2 if unicodedata.east_asian_width(char) in "WF" else 1
        cell = 0 if unicodedata.combining(char) else cell
        if cells + cell > width:
            return text[:position] + " " * (width - cells)
        cells += cell
    return text + " " * (width - cells)
