"""Charts as inline SVG: latency over load, one panel each, lines labelled where they end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from loadtests.report import svg

WIDTH, HEIGHT = 430, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 92, 30, 40
LABEL_STEP = 15
MARKERS = {"sync": "square", "async": "diamond", "persistent": "circle"}

Series = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Range:
    """Limits of an axis; logarithmic where `log`."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float, begin: float, end: float) -> float:
        """A value's position between two pixels."""
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return begin + share * (end - begin)


def log_range(values: Sequence[float]) -> Range:
    """Around all positive values, from a round number (1, 2 or 5) to a round number."""
    ticks = round_numbers(min(values) / 1.05, max(values) * 1.05)
    return Range(ticks[0], ticks[-1], log=True)


def round_numbers(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... from the last not above `low` to the first not below `high`."""
    exponent = math.floor(math.log10(low)) - 1
    numbers = [low]
    while numbers[-1] < high:
        numbers = [
            mantissa * 10.0**power
            for power in range(exponent, exponent + 12)
            for mantissa in (1, 2, 5)
        ]
        numbers.append(high)
    below = [number for number in numbers if number <= low] or numbers[:1]
    inside = [number for number in numbers if below[-1] <= number]
    ticks = []
    for number in inside:
        ticks.append(number)
        if number >= high:
            break
    return ticks if len(ticks) > 1 else [ticks[0] / 2, ticks[0] * 2]


def line_chart(title: str, series: Series, y_range: Range, unit: str) -> str:
    """One panel: x is the arrival rate from 0, y is logarithmic and shared by panels."""
    x_most = max(x for points in series.values() for x, _ in points)
    x_range = Range(0.0, x_most)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [svg.begin("chart", WIDTH, HEIGHT, title), svg.label("panel", LEFT, 16, title)]
    for tick in round_numbers(y_range.low, y_range.high):
        y = y_range.place(tick, bottom, TOP)
        parts.append(svg.line("grid", LEFT, y, right, y))
        parts.append(svg.label("tick", LEFT - 8, y + 4, f"{tick:g}", "end"))
    for x in sorted({x for points in series.values() for x, _ in points}):
        at = x_range.place(x, LEFT, right)
        parts.append(svg.line("axis", at, bottom, at, bottom + 4))
        parts.append(svg.label("tick", at, bottom + 18, f"{x:g}", "middle"))
    parts.append(svg.line("axis", LEFT, bottom, right, bottom))
    middle = (LEFT + right) / 2
    parts.append(svg.label("tick", middle, HEIGHT - 4, "requests per second", "middle"))
    parts.append(svg.label("tick", LEFT - 8, TOP - 14, unit, "end"))
    heights = spread_labels(
        {path: y_range.place(points[-1][1], bottom, TOP) for path, points in series.items()}
    )
    # The broken lines go above the whole one, so that equal paths stay visible.
    for path, points in reversed(series.items()):
        parts += _line(path, points, x_range, y_range, unit)
        parts.append(svg.label(f"end {path}", right + 12, heights[path] + 4, path))
    return "\n".join([*parts, "</svg>"])


def _line(
    path: str, points: Sequence[tuple[float, float]], x_range: Range, y_range: Range, unit: str
) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    places = [
        (x_range.place(x, LEFT, right), y_range.place(y, bottom, TOP), x, y) for x, y in points
    ]
    way = " ".join(
        f"{'L' if index else 'M'}{px:.1f} {py:.1f}" for index, (px, py, _, _) in enumerate(places)
    )
    parts = [f'<path class="line {path}" d="{way}"/>']
    for px, py, x, y in places:
        tip = f"{path}, {x:g} requests/s: {y:.2f} {unit}"
        parts.append(marker(path, px, py, tip))
    return parts


def marker(path: str, x: float, y: float, tip: str) -> str:
    """A mark whose shape, not only colour, tells the path."""
    about = f'class="mark {path}" data-tip="{escape(tip)}"'
    match MARKERS.get(path):
        case "square":
            return f'<rect {about} x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>'
        case "diamond":
            way = f"M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z"
            return f'<path {about} d="{way}"/>'
        case _:
            return f'<circle {about} cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'


def spread_labels(ends: Mapping[str, float]) -> dict[str, float]:
    """Heights of labels, moved apart so that none covers another."""
    ordered = sorted(ends, key=lambda path: ends[path])
    heights: dict[str, float] = {}
    for index, path in enumerate(ordered):
        height = ends[path]
        if index:
            height = max(height, heights[ordered[index - 1]] + LABEL_STEP)
        heights[path] = height
    over = max([0.0, *(height - (HEIGHT - BOTTOM) for height in heights.values())])
    return {path: height - over for path, height in heights.items()}
