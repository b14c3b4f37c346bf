"""Which cells are measured, in which order: all of one path together, since its stack stays up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loadtests.compare.cell import KINDS, Cell


@dataclass(frozen=True, slots=True)
class Grid:
    """The extent of the grid. measure_rate_per_s: the load under which measures are compared."""

    paths: Sequence[str]
    rates_per_s: Sequence[float]
    measures: Sequence[str]
    measure_rate_per_s: float
    load_s: float
    steady_s: float
    frozen_s: float
    batch: int
    parts: Sequence[str] = KINDS
    seed: int = 1

    def cells(self) -> Iterator[Cell]:
        """All of them."""
        for path in self.paths:
            for has_interference in (False, True):
                yield from self._cells_of(path, has_interference)
            if "frozen" in self.parts:
                yield Cell("frozen", path, batch=self.batch, seconds=self.frozen_s, seed=self.seed)
            if "timeline" in self.parts:
                yield Cell("timeline", path, batch=self.batch, seconds=0.5, seed=self.seed)

    def _cells_of(self, path: str, has_interference: bool) -> Iterator[Cell]:
        steady, load = "steady" in self.parts, "load" in self.parts
        for measure in ("none", *self.measures) if has_interference else ("none",):
            if steady:
                yield Cell(
                    "steady", path, has_interference, batch=self.batch, seconds=self.steady_s,
                    measure=measure, seed=self.seed,
                )  # fmt: skip
            rates = self.rates_per_s if measure == "none" else (self.measure_rate_per_s,)
            for rate in rates if load else ():
                yield Cell(
                    "load", path, has_interference, rate_per_s=rate, seconds=self.load_s,
                    measure=measure, seed=self.seed,
                )  # fmt: skip
