"""Figures from what clients saw and what the device counted."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from loadtests.compare.client import Timing
from loadtests.run import percentile

Samples = Mapping[str, float]


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90, p99, max and mean, in ms of values in seconds; None of nothing."""
    if not values:
        return None
    ordered = sorted(1e3 * value for value in values)
    figures = {f"p{rank}": percentile(ordered, rank) for rank in (50, 90, 99)}
    figures |= {"max": ordered[-1], "mean": statistics.fmean(ordered)}
    return {name: round(value, 4) for name, value in figures.items()}


def client_figures(timings: Sequence[Timing], begin_s: float, end_s: float) -> dict[str, Any]:
    """TTFT, TPOT, ITL, and the tokens that came within [begin, end)."""
    good = [timing for timing in timings if timing.times_s]
    gaps = [
        later - earlier
        for timing in good
        for earlier, later in itertools.pairwise(timing.times_s)
        if begin_s <= later < end_s
    ]
    num_tokens = sum(begin_s <= at < end_s for timing in good for at in timing.times_s)
    return {
        "num_requests": len(timings),
        "num_failed": sum(bool(timing.error) for timing in timings),
        "num_ended": sum(len(timing.times_s) >= timing.num_output for timing in timings),
        "first_error": next((timing.error for timing in timings if timing.error), None),
        "ttft_ms": spread([timing.ttft_s for timing in good]),
        "tpot_ms": spread([value for timing in good if (value := timing.tpot_s) is not None]),
        "itl_ms": spread(gaps),
        "num_tokens": num_tokens,
        "tokens_per_s": round(num_tokens / (end_s - begin_s), 2),
    }


def device_figures(before: Samples, after: Samples, span_s: float) -> dict[str, Any]:
    """Shares of the device's own clock: inside steps, between steps with work, without work.

    The gap share is of the time with work (steps and gaps); a window that had no step has None.
    """
    step_s, gap_s, idle_s, steps, tokens = (
        after[name] - before[name]
        for name in (
            "engine_step_seconds",
            "engine_gap_seconds",
            "engine_idle_seconds",
            "engine_steps",
            "generation_tokens",
        )
    )
    total_s = step_s + gap_s + idle_s
    has_work = step_s + gap_s > 0
    return {
        "num_steps": int(steps),
        "device_tokens": int(tokens),
        "mean_step_ms": round(1e3 * step_s / steps, 4) if steps else None,
        "mean_gap_ms": round(1e3 * gap_s / steps, 4) if steps else None,
        "busy_share": round(step_s / total_s, 6) if total_s else None,
        "gap_share": round(gap_s / (step_s + gap_s), 6) if has_work else None,
        "window_s": round(span_s, 3),
    }


def per_token(total: float | None, num_tokens: int) -> float | None:
    """A total over tokens, where there are both."""
    return total / num_tokens if total is not None and num_tokens else None


def longest_gap_ms(timings: Sequence[Timing], begin_s: float, end_s: float) -> float | None:
    """The longest time in [begin, end) in which a stream, still going, brought no token.

    A gap counts if any part of it lies within; a stream that never went on counts to `end_s`.
    """
    longest = None
    for timing in timings:
        times = [*timing.times_s, end_s] if timing.error else timing.times_s
        for earlier, later in itertools.pairwise(times):
            if later > begin_s and earlier < end_s:
                gap = min(later, end_s) - max(earlier, begin_s)
                longest = gap if longest is None else max(longest, gap)
    return None if longest is None else round(1e3 * longest, 3)
