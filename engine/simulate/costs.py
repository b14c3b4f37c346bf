"""What a control path takes beside the passes: measured distributions, by path.

`settle_ns`: from the end of a pass until the host's turn begins. `turn_ns`: the scheduler's turn,
with what calls it. `launch_ns`: from there until the pass may start. `gap_ns`: from the end of a
pass until the device starts the one that it has been given already. `extra_ns`: a pass beyond its
profile. Those that a path does not have are zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from engine.errors import UserError

SHIPPED = Path(__file__).parent / "costs"
KINDS = ("settle_ns", "turn_ns", "launch_ns", "gap_ns", "extra_ns")
"""In the order of csrc/simulate.cpp: CostKind."""
NUM_SAMPLES = 1024
"""Of a distribution."""
Samples = npt.NDArray[np.uint64]
"""u64[len(KINDS), n >= 1] ns; the samples of a kind are equally likely."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Distributions by path and kind, each by its quantiles at `percent`; where they come from."""

    name: str
    what: str
    hardware: str
    date: str
    percent: tuple[float, ...]
    paths: Mapping[str, Mapping[str, tuple[float, ...]]]

    @classmethod
    def load(cls, name: str) -> Self:
        """Shipped ones by name, or a file; raises UserError in one sentence."""
        shipped = SHIPPED / f"{name}.json"
        path = shipped if shipped.is_file() else Path(name).expanduser()
        if not path.is_file():
            known = ", ".join(sorted(one.stem for one in SHIPPED.glob("*.json")))
            raise UserError(f"no costs {name!r}: neither a file nor one of {known}")
        try:
            return cls._from_mapping(path.stem, json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} does not hold the costs of control paths ({error})") from error

    @classmethod
    def _from_mapping(cls, name: str, fields: Mapping[str, Any]) -> Self:
        percent = tuple(float(one) for one in fields["percent"])
        if not percent or list(percent) != sorted(set(percent)):
            raise ValueError("percent must ascend")
        paths = {}
        for path, kinds in fields["paths"].items():
            for kind in kinds:
                if kind not in KINDS:
                    raise ValueError(f"{path} has {kind}, which is none of {', '.join(KINDS)}")
            paths[path] = {kind: _quantiles(kind, kinds[kind], len(percent)) for kind in kinds}
        what, hardware, date = (str(fields[key]) for key in ("what", "hardware", "date"))
        return cls(name, what, hardware, date, percent, paths)

    def samples(self, path: str) -> Samples:
        """For the simulation; raises UserError for a path that was not measured."""
        if path not in self.paths:
            raise UserError(f"the costs {self.name} do not have path {path}")
        table = no_costs()
        at = (np.arange(NUM_SAMPLES) + 0.5) * 100 / NUM_SAMPLES
        for kind, values in self.paths[path].items():
            table[KINDS.index(kind)] = np.interp(at, self.percent, values).round()
        return table

    def to_json(self) -> str:
        """As `load` reads it, a line for each distribution."""
        head = {key: getattr(self, key) for key in ("what", "hardware", "date", "percent")}
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        paths = []
        for path, kinds in self.paths.items():
            inner = [f"   {json.dumps(one)}: {json.dumps(kinds[one])}" for one in kinds]
            paths.append(f"  {json.dumps(path)}: {{\n" + ",\n".join(inner) + "\n  }")
        lines.append(' "paths": {\n' + ",\n".join(paths) + "\n }")
        return "{\n" + ",\n".join(lines) + "\n}\n"


def no_costs() -> Samples:
    """Of a path that takes no time of its own."""
    return np.zeros((len(KINDS), NUM_SAMPLES), np.uint64)


def _quantiles(kind: str, values: Any, wanted: int) -> tuple[float, ...]:
    found = tuple(float(one) for one in values)
    if len(found) != wanted:
        raise ValueError(f"{kind} has {len(found)} values, percent has {wanted}")
    if not all(0 <= one < 1e12 for one in found) or list(found) != sorted(found):
        raise ValueError(f"{kind} must ascend, from 0 or more")
    return found
