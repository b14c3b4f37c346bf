"""Who works when: a stretch of steps of each path, as SVG and as a Chrome/Perfetto trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from engine.errors import UserError
from loadtests.report import svg

LANES = ("scheduler", "host", "upload", "device", "download")
LANE_TEXT = {
    "scheduler": "scheduler",
    "host": "host",
    "upload": "upload",
    "device": "GPU steps",
    "download": "download",
}
WIDTH, LEFT, RIGHT = 960, 96, 16
LANE_HEIGHT, BAR_HEIGHT, TITLE_HEIGHT, AXIS_HEIGHT = 26, 18, 30, 34
NUM_STEPS_SHOWN = 6
LEAST_PIXELS = 0.75


@dataclass(frozen=True, slots=True)
class Event:
    """Somebody works, in ns of one clock."""

    lane: str
    name: str
    start_ns: int
    end_ns: int
    step: int
    tokens: int
    rows: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """All that a run of a path wrote down."""

    path: str
    events: Sequence[Event]


def read_timeline(file: Path) -> Timeline:
    """Read what ``serve --timeline`` wrote; raises UserError where it is something else."""
    try:
        value = json.loads(file.read_text())
        events = [
            Event(
                str(one["lane"]), str(one["name"]), int(one["start_ns"]), int(one["end_ns"]),
                int(one.get("step", 0)), int(one.get("tokens", 0)), int(one.get("rows", 0)),
            )
            for one in value["events"]
        ]  # fmt: skip
        return Timeline(str(value["path"]), sorted(events, key=lambda event: event.start_ns))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not a timeline: {type(error).__name__}: {error}") from None


def stretch(timeline: Timeline, span_ns: int) -> list[Event]:
    """Events that touch `span_ns` from a decode step in the middle of the run."""
    steps = [event for event in timeline.events if event.lane == "device"]
    if not steps:
        return []
    begin = steps[len(steps) // 2].start_ns
    return [
        event
        for event in timeline.events
        if event.end_ns > begin and event.start_ns < begin + span_ns
    ]


def span_of(timelines: Sequence[Timeline]) -> int:
    """A span for all: so long that the slowest path shows some steps."""
    longest = 0
    for timeline in timelines:
        steps = [event for event in timeline.events if event.lane == "device"]
        middle = steps[len(steps) // 2 :][: NUM_STEPS_SHOWN + 1]
        if len(middle) > 1:
            longest = max(longest, middle[-1].start_ns - middle[0].start_ns)
    return longest or 1_000_000


def gap_share(timeline: Timeline) -> float | None:
    """Of the time from the first step to the last of the stretch's half, the part without one."""
    steps = [event for event in timeline.events if event.lane == "device"]
    steps = steps[len(steps) // 4 : len(steps) * 3 // 4]
    if len(steps) < 2:
        return None
    whole = steps[-1].end_ns - steps[0].start_ns
    return 1 - sum(event.end_ns - event.start_ns for event in steps) / whole if whole else None


def draw(timelines: Sequence[Timeline]) -> str:
    """All paths below each other on one scale of time."""
    span_ns = span_of(timelines)
    parts: list[str] = []
    y = 0.0
    for timeline in timelines:
        events = stretch(timeline, span_ns)
        if not events:
            continue
        lanes = [lane for lane in LANES if any(event.lane == lane for event in events)]
        parts.append(svg.label(f"panel {timeline.path}", 0, y + 17, timeline.path))
        share = gap_share(timeline)
        if share is not None:
            text = f"GPU idle between steps {100 * share:.2f} % of this run"
            parts.append(svg.label("tick", LEFT, y + 17, text))
        y += TITLE_HEIGHT
        begin = min(event.start_ns for event in events if event.lane == "device")
        for lane in lanes:
            parts += _lane(lane, [e for e in events if e.lane == lane], begin, span_ns, y)
            y += LANE_HEIGHT
        y += 12
    parts += _axis(span_ns, y)
    begin_tag = svg.begin("timeline", WIDTH, y + AXIS_HEIGHT, "Steps of each path over time")
    return "\n".join([begin_tag, *parts, "</svg>"])


def _lane(lane: str, events: Sequence[Event], begin: int, span_ns: int, y: float) -> list[str]:
    scale = (WIDTH - LEFT - RIGHT) / span_ns
    parts = [
        svg.label("tick", LEFT - 10, y + 13, LANE_TEXT[lane], "end"),
        f'<rect class="lane {"idle" if lane == "device" else ""}" x="{LEFT}" y="{y:.0f}" '
        f'width="{WIDTH - LEFT - RIGHT}" height="{BAR_HEIGHT}"/>',
    ]
    for event in events:
        left = max(0.0, (event.start_ns - begin) * scale)
        right = min(float(WIDTH - LEFT - RIGHT), (event.end_ns - begin) * scale)
        if right < 0 or left > WIDTH - LEFT - RIGHT:
            continue
        width = max(LEAST_PIXELS, right - left)
        tip = (
            f"{event.name}, step {event.step}: {(event.end_ns - event.start_ns) / 1e6:.3f} ms, "
            f"{event.rows} rows, {event.tokens} tokens"
        )
        parts.append(
            f'<rect class="bar {lane} {"odd" if event.step % 2 else "even"}" '
            f'x="{LEFT + left:.2f}" y="{y:.0f}" width="{width:.2f}" '
            f'height="{BAR_HEIGHT}" data-tip="{escape(tip)}"/>'
        )
        if lane == "device" and width > 60:
            middle = LEFT + left + width / 2
            parts.append(svg.label("inbar", middle, y + 13, f"step {event.step}", "middle"))
    return parts


def _axis(span_ns: int, y: float) -> list[str]:
    span_ms = span_ns / 1e6
    step = next(s * 10.0**p for p in range(-4, 6) for s in (1, 2, 5) if s * 10.0**p * 8 >= span_ms)
    width = WIDTH - LEFT - RIGHT
    parts = [svg.line("axis", LEFT, y, WIDTH - RIGHT, y)]
    for index in range(int(span_ms / step) + 1):
        x = LEFT + index * step / span_ms * width
        text = f"{index * step:g}" + (" ms" if index == 0 else "")
        parts.append(svg.line("axis", x, y, x, y + 4))
        parts.append(svg.label("tick", x, y + 18, text, "middle"))
    return parts


def trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The Trace Event Format, which Perfetto and chrome://tracing open: a path is a process."""
    entries: list[Mapping[str, Any]] = []
    for pid, timeline in enumerate(timelines, 1):
        begin = min((event.start_ns for event in timeline.events), default=0)
        entries.append(_name("process_name", pid, 0, f"path {timeline.path}"))
        for tid, lane in enumerate(LANES, 1):
            if any(event.lane == lane for event in timeline.events):
                entries.append(_name("thread_name", pid, tid, LANE_TEXT[lane]))
        entries += [
            {
                "ph": "X",
                "name": event.name,
                "cat": event.lane,
                "ts": (event.start_ns - begin) / 1e3,
                "dur": (event.end_ns - event.start_ns) / 1e3,
                "pid": pid,
                "tid": LANES.index(event.lane) + 1 if event.lane in LANES else 0,
                "args": {"step": event.step, "tokens": event.tokens, "rows": event.rows},
            }
            for event in timeline.events
        ]
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
