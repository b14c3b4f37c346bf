"""One cell of the grid: what is measured, as a value that can be written down and found again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

KINDS = ("load", "steady", "frozen", "timeline")


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured.

    kind: ``load`` (Poisson arrivals at `rate_per_s`), ``steady`` (`batch` streams that decode),
    ``frozen`` (the same, and the host stands still for `seconds`), ``timeline`` (a few streams on a
    stack that writes down who works when). measure: a counter-measure's name, or ``none``.
    """

    kind: str
    path: str
    has_interference: bool = False
    measure: str = "none"
    rate_per_s: float = 0.0
    batch: int = 0
    seconds: float = 0.0
    seed: int = 1

    @property
    def title(self) -> str:
        """For the progress bar."""
        load = f"{self.rate_per_s:g} req/s" if self.kind == "load" else f"{self.kind} {self.batch}"
        words = [self.path, load, "interference" if self.has_interference else "idle"]
        if self.measure != "none":
            words.append(self.measure)
        return " · ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """For the result."""
        return asdict(self)


def key_of(cell: Cell, configuration: dict[str, Any], commit: str) -> str:
    """What makes two measurements the same measurement."""
    text = json.dumps([cell.to_dict(), configuration, commit], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
