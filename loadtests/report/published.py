"""Figures that others published, each with its source: what the measured ones stand beside."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """Where published figures come from."""

    name: str
    where: str
    setting: str


ASYNC_BATCHING = Source(
    "Asynchronous continuous batching",
    "Hugging Face, 2026-05",
    "8B model, batch 32, 8K tokens",
)
BLINK = Source("Blink: CPU-free LLM inference", "arXiv 2604.07609", "against host-driven engines")

SYNC_IDLE_SHARE = 0.240
ASYNC_IDLE_SHARE = 0.006
"""99.4 % GPU-busy with double buffering."""
ASYNC_TIME_SAVED = 0.24
"""300.6 s to 228 s if the idle time is removed."""
TTFT_P99_RATIO = 8.47
TPOT_P99_RATIO = 3.40
KEPT_LOW, KEPT_HIGH = 0.28, 0.54
"""Throughput that host-driven engines keep under interference."""
ENERGY_SAVED = 0.486
