"""Results as JSON lines: one a cell, appended as soon as it is measured."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from engine.errors import UserError

SCHEMA = 1


class Store:
    """A file of results. Raises UserError when a line is not a result."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.results = read_results(path) if path.exists() else []

    def has(self, key: str) -> bool:
        """Whether this cell is there, measured and valid."""
        return any(result["key"] == key and result["valid"] for result in self.results)

    def add(self, result: dict[str, Any]) -> None:
        """Append one line; a torn write leaves the lines before it whole."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab+") as file:
            if file.tell():
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)  # a line cut short by a crash
            file.write(json.dumps(result).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.results.append(result)


def read_results(path: Path) -> list[dict[str, Any]]:
    """All results of a file; a last line cut short by a crash is left out."""
    text = path.read_text()
    lines = text.split("\n")
    results = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            result = json.loads(line)
            if result["schema"] != SCHEMA:
                raise ValueError(f"schema {result['schema']}, this is {SCHEMA}")
            results.append(result)
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise UserError(f"{path}, line {number} is not a result: {error}") from None
    return results


def commit() -> str:
    """The commit, with a digest of what differs from it; ``unknown`` outside a repository."""
    root = Path(__file__).parents[2]

    def git(*words: str) -> bytes:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, check=True, timeout=30
        ).stdout

    try:
        head = git("rev-parse", "--short=12", "HEAD").decode().strip()
        changes = git("diff", "HEAD", "--", "engine", "emulation", "loadtests")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{head}+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else head


def hardware() -> dict[str, Any]:
    """The machine, in words and numbers."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "gpu": _gpu(),
    }


def _gpu() -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().replace("\n", ", ") or None
