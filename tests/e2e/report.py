"""What an end-to-end run found out, for the summary at its end."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.client import Reply

REPORT_VARIABLE = "BLINKBED_E2E_REPORT"


@dataclass(slots=True)
class Report:
    """Filled by the tests, written as JSON when they are over."""

    link: str
    reason: str
    """Why this link."""
    started_at: str = field(
        default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    )
    machine: str = f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}"
    server: dict[str, Any] = field(default_factory=dict)
    """/server_info of the stack that was measured."""
    figures: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    """RDMA counters of both sides, at the end of each stack, added up."""
    recovery_s: dict[str, float] = field(default_factory=dict)
    """By fault: from the end of the fault to the first right answer."""
    tests: dict[str, str] = field(default_factory=dict)

    def measure(self, replies: Sequence[Reply]) -> None:
        """TTFT, TPOT and rate of these streams, which ran at the same time."""
        began = min(reply.started_s for reply in replies)
        ended = max(reply.ended_s for reply in replies)
        self.figures["num_streams"] = len(replies)
        self.figures["tokens_per_s"] = sum(len(r.token_ids) for r in replies) / (ended - began)
        for name, values in (
            ("ttft_ms", [reply.ttft_s * 1e3 for reply in replies]),
            ("tpot_ms", [reply.tpot_s * 1e3 for reply in replies]),
        ):
            for percent in (50, 99):
                self.figures[f"{name}_p{percent}"] = percentile(values, percent)

    def add_counters(self, counters: dict[str, float]) -> None:
        """Counters of a stack that ends."""
        for name, value in counters.items():
            self.counters[name] = self.counters.get(name, 0.0) + value

    def write(self, path: Path) -> None:
        """As JSON, for people and programs."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many per cent do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]
