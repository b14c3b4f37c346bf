"""The table of all loads and paths, from what the parts of loadtests.bench_h200 wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtests.bench_h200_http import DECODE, LOADS, LONG

PATHS = ("persistent", "async", "sync")
CONDITIONS = ("idle", "interference")
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A line: a figure of a load; what vLLM 0.25.1 did on such a machine, and the target, idle.

    least: the target is a least and not a most. slack: how much worse interference may make it.
    """

    title: str
    load: str
    unit: str
    value: Callable[[Figures], float]
    target: float
    vllm: tuple[float, ...] = ()
    least: bool = False
    slack: float = 0.02
    digits: int = 2

    def met(self, idle: float) -> bool:
        """The target, on an idle host."""
        return idle >= self.target if self.least else idle <= self.target

    def kept(self, idle: float, pressed: float) -> bool:
        """Under interference within the slack of idle."""
        return (
            pressed >= idle * (1 - self.slack) if self.least else pressed <= idle * (1 + self.slack)
        )


def _of(name: str) -> Callable[[Figures], float]:
    return lambda figures: float(figures[name])


def _seconds(figures: Figures) -> float:
    return float(figures["ms_per_token_of_a_stream_with_prefill"]) * LOADS[LONG].num_tokens / 1e3


def _poisson(load: str, numbers: tuple[tuple[float, tuple[float, ...]], ...]) -> tuple[Row, ...]:
    names = (("ttft", "p50", 0.05), ("ttft", "p99", 0.05), ("tpot", "p50", 0.02),
             ("tpot", "p99", 0.02))  # fmt: skip
    return tuple(
        Row(f"{load}: {what.upper()} {rank}", load, "ms", _of(f"{what}_{rank}_ms"), target, vllm,
            slack=slack)
        for (what, rank, slack), (target, vllm) in zip(names, numbers, strict=True)
    )  # fmt: skip


def _gap_percent(figures: Figures) -> float:
    return 100 * float(figures["gap_share"])


ENERGY = _of("joules_per_token")
BATCH = "256 x 256"
ROWS = (
    Row(f"{DECODE}, ms a token, with prefill", DECODE, "ms",
        _of("ms_per_token_of_a_stream_with_prefill"), 4.6, (5.74, 8.40)),
    Row(LONG, LONG, "s", _seconds, 66, (73.2,), digits=1),
    *_poisson("8 req/s", ((18, (23.6, 127)), (35, (59.3, 239)), (4.6, (5.50, 13.8)),
                          (5.5, (6.14, 18.7)))),
    *_poisson("24 req/s", ((25, (31.0, 274)), (55, (62.8, 812)), (6.0, (7.11, 69.9)),
                           (8.5, (10.03, 86.9)))),
    Row(BATCH, BATCH, "tokens/s", _of("tokens_per_s"), 22000, (18405, 6061), least=True, digits=0),
    Row(f"energy, {DECODE}", DECODE, "J/token", ENERGY, 0.090, (0.108, 0.134), digits=4),
    Row(f"energy, {BATCH}", BATCH, "J/token", ENERGY, 0.032, (0.038, 0.056), digits=4),
    Row(f"between steps, {DECODE}", DECODE, "%", _gap_percent, 0.5, slack=0.1),
)  # fmt: skip


def table(parts: dict[str, Figures]) -> str:
    """Markdown; parts: what each path's part wrote, by path. A path that is not there is "-"."""
    head = ["load", "vLLM", *PATHS, "target", "persistent"]
    lines = [head, ["---"] * len(head)]
    for row in ROWS:
        lines.append(
            [
                f"{row.title}, {row.unit}",
                _pair(row, row.vllm),
                *(_pair(row, _values(row, parts.get(path))) for path in PATHS),
                f"{row.target:g}",
                _verdict(row, _values(row, parts.get("persistent"))),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in [*lines, *_frozen(parts)])


def _values(row: Row, part: Figures | None) -> tuple[float, ...]:
    found = (part or {}).get(row.load, {})
    return tuple(row.value(found[one]) for one in CONDITIONS if one in found)


def _pair(row: Row, values: tuple[float, ...]) -> str:
    return " / ".join(f"{value:,.{row.digits}f}" for value in values) or "-"


def _verdict(row: Row, values: tuple[float, ...]) -> str:
    words = ["met" if row.met(value) else "missed" for value in values[:1]]
    words += ["kept" if row.kept(*values) else "not kept" for _ in values[1:]]
    return ", ".join(words) or "not measured"


def _frozen(parts: dict[str, Figures]) -> list[list[str]]:
    gaps = {path: part["host_frozen"] for path, part in parts.items() if "host_frozen" in part}
    shown = [
        f"{gaps[path]['begun_before']['longest_gap_ms']:,.1f}" if path in gaps else "-"
        for path in PATHS
    ]
    return [["host frozen for 10 s: longest gap, ms", "stalls", *shown, "as without", ""]]


def read_parts(folder: Path) -> dict[str, Figures]:
    """By path, of the files that are there."""
    files = {path: folder / f"http-{path}.json" for path in PATHS}
    return {path: json.loads(file.read_text()) for path, file in files.items() if file.exists()}
