"""The same three paths on a real GPU, as this project measured them: beside an emulated report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loadtests.report.selection import PATHS
from loadtests.report.tables import MEASURED, Figure, Row, Table, milliseconds, percent

STREAMS, RATE = "32 x 512", "24 req/s"
SOURCE = Path(__file__).parents[2] / "docs/results/h200-table-2026-12-01.json"


def h200_table(source: Path = SOURCE) -> Table | None:
    """None where the figures are not there (an installation without the documents)."""
    if not source.exists():
        return None
    runs: dict[str, Any] = json.loads(source.read_text())
    paths = [path for path in PATHS if path in runs]
    first = runs[paths[0]]
    table = Table(
        "What a real GPU says",
        f"{first['hardware']}, {first['date']}, another machine than this report's: "
        f"{STREAMS} decode streams, and requests at random times. From {source.name}.",
        None,
        paths,
    )

    def row(label: str, texts: dict[str, str | None]) -> None:
        figures = {path: Figure(text, MEASURED) if text else None for path, text in texts.items()}
        table.rows.append(Row(label, None, figures))

    idle = {path: _throughput(runs[path], "idle") for path in paths}
    pressed = {path: _throughput(runs[path], "interference") for path in paths}
    row("Throughput, tokens/s", {path: f"{idle[path]:,.0f}" for path in paths})
    if best := idle.get("persistent"):
        row("Over persistent", {path: percent(idle[path] / best) for path in paths})
    row(
        "Throughput kept under interference",
        {path: percent(pressed[path] / idle[path]) for path in paths},
    )
    row(
        "GPU idle between steps",
        {path: percent(runs[path][STREAMS]["idle"]["gap_share"], 2) for path in paths},
    )
    conditions = (("idle", "idle"), ("interference", "under interference"))
    for condition, where in conditions:
        for name, label in (("ttft_p99_ms", "P99 TTFT"), ("tpot_p99_ms", "P99 TPOT")):
            row(
                f"{label} at {RATE}, {where}",
                {path: milliseconds(runs[path][RATE][condition][name]) for path in paths},
            )
    for condition, where in conditions:
        row(
            f"Energy per token, {where}",
            {path: f"{runs[path][STREAMS][condition]['joules_per_token']:.3f} J" for path in paths},
        )
    row(
        "Longest gap between tokens, host stopped for 10 s",
        {
            path: milliseconds(runs[path]["host_frozen"]["begun_before"]["longest_gap_ms"])
            for path in paths
        },
    )
    return table


def _throughput(run: dict[str, Any], condition: str) -> float:
    return float(run[STREAMS][condition]["tokens_per_s"])
