"""The requests of a cell: Poisson arrivals with a fixed seed, ShareGPT-like lengths."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from loadtests.compare.cell import Cell
from loadtests.compare.client import Request

PROMPT_TOKENS = 128
SPARE_TOKENS = 8  # BOS, and what a chat template might add


def requests_of(cell: Cell, context: int) -> list[Request]:
    """All requests that arrive within the cell's time; the same for every path."""
    wanted = int(2 * cell.rate_per_s * cell.seconds) + 20
    table = json.loads((Path(__file__).parents[2] / "engine/lengths.json").read_text())
    random = np.random.default_rng(cell.seed)
    times = np.cumsum(random.exponential(1.0 / cell.rate_per_s, wanted))
    sizes = [
        np.interp(random.uniform(0, 100, wanted), table["percent"], table[name])
        for name in ("prompt_tokens", "output_tokens")
    ]
    requests = []
    for at_s, num_prompt, num_output in zip(times, *sizes, strict=True):
        if at_s < cell.seconds:
            prompt = max(1, min(int(num_prompt), context // 2 - SPARE_TOKENS))
            output = max(1, min(int(num_output), context - prompt - SPARE_TOKENS))
            requests.append(Request(float(at_s), prompt, output))
    return requests
