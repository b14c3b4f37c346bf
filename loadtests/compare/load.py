"""The requests of a cell: Poisson arrivals with a fixed seed, ShareGPT-like lengths."""

from __future__ import annotations

from engine.workload import arrivals, lengths
from loadtests.compare.cell import Cell
from loadtests.compare.client import Request

PROMPT_TOKENS = 128
SPARE_TOKENS = 8  # BOS, and what a chat template might add


def requests_of(cell: Cell, context: int) -> list[Request]:
    """All requests that arrive within the cell's time; the same for every path."""
    wanted = int(2 * cell.rate_per_s * cell.seconds) + 20
    times = arrivals(cell.rate_per_s, wanted, cell.seed)
    sizes = lengths(wanted, cell.seed, max_context=context - 2 * SPARE_TOKENS)
    return [
        Request(float(at_s), int(prompt), int(output))
        for at_s, (prompt, output) in zip(times, sizes, strict=True)
        if at_s < cell.seconds
    ]
