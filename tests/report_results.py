"""Results as `blinkbed compare` writes them, made up: for tests of the report alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PATHS = ("sync", "async", "persistent")
STEP_MS = 4.6
GAP_MS = {"sync": 1.45, "async": 0.05, "persistent": 0.012}
SLOWER = {"sync": 2.6, "async": 1.9, "persistent": 1.003}
RATES = (4.0, 8.0, 16.0)


def spread(p50: float) -> dict[str, float]:
    return {"p50": p50, "p90": 1.5 * p50, "p99": 3 * p50, "max": 4 * p50, "mean": 1.1 * p50}


def result(kind: str, path: str, **values: Any) -> dict[str, Any]:
    """One line; `values` go into the cell, figures follow from it."""
    cell = {
        "kind": kind,
        "path": path,
        "has_interference": False,
        "measure": "none",
        "rate_per_s": 0.0,
        "batch": 0 if kind == "load" else 32,
        "seconds": 6.0,
        "seed": 1,
        **values,
    }
    slower = SLOWER[path] if cell["has_interference"] else 1.0
    turn_ms = (STEP_MS + GAP_MS[path]) * slower
    scale = 1 + cell["rate_per_s"] / 20
    measure = cell["measure"]
    return {
        "schema": 1,
        "key": f"{kind}{path}{values}",
        "when": "2026-12-01T00:00:00Z",
        "commit": "0123456789ab",
        "hardware": {
            "cpu": "A CPU",
            "num_cpus": 2,
            "memory_gib": 23.5,
            "kernel": "6.1",
            "gpu": None,
        },
        "cell": cell,
        "configuration": {
            "model": "paced:8b-h200",
            "device": "sim",
            "link": "shm",
            "cpus": {"host": "0", "device": "1", "smartnic": "1", "client": "1"},
        },
        "link": "shm",
        "link_reason": "asked for",
        "window": "simulated device memory",
        "pace": "the device goes first",
        "emulated": {"gpu": "simulated GPU", "link": "shared memory"},
        "measure": {"name": measure, "available": measure != "pinning", "how": "how it was done"},
        "interference": "own burners on CPU 0" if cell["has_interference"] else "none",
        "valid": True,
        "reasons": [],
        "figures": {
            "num_requests": 32,
            "num_failed": 0,
            "ttft_ms": spread(20 * slower * scale),
            "tpot_ms": spread(turn_ms * scale / 2),
            "itl_ms": spread(turn_ms),
            "num_tokens": 1000,
            "tokens_per_s": 32e3 / turn_ms,
            "num_steps": 100,
            "mean_step_ms": STEP_MS,
            "mean_gap_ms": turn_ms - STEP_MS,
            "gap_share": 1 - STEP_MS / turn_ms,
            "host_us_per_token": 0.0 if path == "persistent" else 12.5,
            "joules_per_token": None,
            "gap_before_ms": 1.3 * turn_ms,
            "gap_frozen_ms": 1.4 * turn_ms if path == "persistent" else 10050.0,
            "frozen_s": 10.0,
        }
        if measure != "pinning"
        else None,
    }


def all_results() -> list[dict[str, Any]]:
    """A whole grid in which the published claims hold."""
    results = []
    for path in PATHS:
        for pressed in (False, True):
            results.append(result("steady", path, has_interference=pressed))
            results += [
                result("load", path, has_interference=pressed, rate_per_s=rate) for rate in RATES
            ]
        for measure in ("pinning", "realtime"):
            results.append(result("steady", path, has_interference=True, measure=measure))
        results.append(result("frozen", path))
    return results


def timeline(path: str) -> dict[str, Any]:
    """Forty steps as `serve --timeline` writes them."""
    events: list[dict[str, Any]] = []
    now = 5_000_000_000

    def add(lane: str, name: str, start: float, length_ms: float, step: int) -> float:
        end = start + length_ms * 1e6
        events.append(
            {
                "lane": lane,
                "name": name,
                "start_ns": int(start),
                "end_ns": int(end),
                "step": step,
                "tokens": 32,
                "rows": 32,
            }
        )
        return end

    at = float(now)
    for step in range(40):
        end = add("device", "step", at, STEP_MS, step)
        if path == "sync":
            end = add("download", "results", end, 0.2, step)
            end = add("host", "publish and plan", end, 0.9, step)
            at = add("upload", "tables", end, 0.35, step)
        elif path == "async":
            up = add("host", "plan ahead", at + 0.4e6, 1.1, step)
            add("upload", "tables", up, 0.3, step)
            add("download", "results", end, 0.2, step)
            at = end + GAP_MS[path] * 1e6
        else:
            at = add("scheduler", "scheduler node", end, GAP_MS[path], step)
    return {"path": path, "events": events}


def write_comparison(folder: Path, results: list[dict[str, Any]]) -> Path:
    """The files that a comparison leaves; the results' path."""
    file = folder / "compare.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in results))
    for path in PATHS:
        (folder / f"timeline-{path}.json").write_text(json.dumps(timeline(path)))
    return file
