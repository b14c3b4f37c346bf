"""Finding figures among results: the newest valid one of each cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PATHS = ("sync", "async", "persistent")
Figures = Mapping[str, Any]
LEAST_NOISE = 0.02


class Selection:
    """The results that a report is about. Later lines replace earlier ones of the same cell.

    Only results of the last line's configuration and commit are taken: figures of different models,
    devices, links or programs are not comparable.
    """

    def __init__(self, results: Sequence[dict[str, Any]]) -> None:
        self.newest = results[-1]
        same = [one for one in results if _setting(one) == _setting(self.newest)]
        self.others = len(results) - len(same)
        self._by_cell: dict[tuple[Any, ...], dict[str, Any]] = {}
        for one in same:
            place = cell_key(one["cell"])
            if one["valid"] or place not in self._by_cell:
                self._by_cell[place] = one

    @property
    def results(self) -> list[dict[str, Any]]:
        """One of each cell."""
        return list(self._by_cell.values())

    @property
    def is_emulated(self) -> bool:
        """Whether the GPU of these results is a simulated one."""
        return bool(self.newest["configuration"]["device"] != "cuda")

    @property
    def noise(self) -> float:
        """How far throughput strays by itself, as a share, and never less than 2 %.

        Interference makes nothing faster: what a path gains by it is the measurement's own error.
        """
        names = ["none", *(measure["name"] for measure in self.measures())]
        kept = [self.kept(path, name) or 0.0 for path in self.paths for name in names]
        return max([LEAST_NOISE, *(share - 1 for share in kept)])

    @property
    def invalid(self) -> list[dict[str, Any]]:
        """Cells whose figures are not shown."""
        return [one for one in self.results if not one["valid"]]

    @property
    def commits(self) -> list[str]:
        """All that took part."""
        return sorted({one["commit"] for one in self.results})

    @property
    def paths(self) -> list[str]:
        """Those with any result."""
        found = {one["cell"]["path"] for one in self.results}
        return [path for path in PATHS if path in found]

    @property
    def rates(self) -> list[float]:
        """Arrival rates that were measured."""
        cells = (one["cell"] for one in self.results)
        return sorted({cell["rate_per_s"] for cell in cells if cell["kind"] == "load"})

    def figures(
        self,
        kind: str,
        path: str,
        *,
        interference: bool = False,
        measure: str = "none",
        rate: float = 0.0,
    ) -> Figures | None:
        """Figures of a cell; None where it was not measured, or must not be believed."""
        for one in self.results:
            cell = one["cell"]
            if (cell["kind"], cell["path"], cell["has_interference"], cell["measure"]) == (
                *(kind, path, interference, measure),
            ) and (kind != "load" or cell["rate_per_s"] == rate):
                return one["figures"] if one["valid"] else None
        return None

    def measures(self) -> list[dict[str, Any]]:
        """Each counter-measure with its words, once."""
        found = {
            one["measure"]["name"]: one["measure"] for one in self.results if one.get("measure")
        }
        found.pop("none", None)
        return list(found.values())

    def percentile(
        self, path: str, what: str, rate: float, *, interference: bool, measure: str = "none"
    ) -> float | None:
        """p99 in ms of ``ttft_ms``, ``tpot_ms`` or ``itl_ms`` under a load."""
        figures = self.figures("load", path, interference=interference, measure=measure, rate=rate)
        spread = figures[what] if figures else None
        return spread["p99"] if spread else None

    def kept(self, path: str, measure: str = "none") -> float | None:
        """Throughput of steady decode under interference, as a share of that without."""
        idle = self.figures("steady", path)
        pressed = self.figures("steady", path, interference=True, measure=measure)
        if not idle or not pressed or not idle["tokens_per_s"]:
            return None
        return float(pressed["tokens_per_s"] / idle["tokens_per_s"])

    def gain(self, path: str, over: str) -> float | None:
        """Steady throughput over another path's, less one."""
        mine, theirs = self.figures("steady", path), self.figures("steady", over)
        if not mine or not theirs or not theirs["tokens_per_s"]:
            return None
        return float(mine["tokens_per_s"] / theirs["tokens_per_s"] - 1)


def _setting(result: Mapping[str, Any]) -> tuple[Any, Any]:
    return result["configuration"], result["commit"]


def cell_key(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    """A cell without its duration and seed."""
    names = ("kind", "path", "has_interference", "measure", "rate_per_s", "batch")
    return tuple(cell[name] for name in names)
