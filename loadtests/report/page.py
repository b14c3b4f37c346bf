"""The report as one HTML page without anything from outside it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from loadtests.report.chart import line_chart, log_range
from loadtests.report.conclusions import Conclusion
from loadtests.report.selection import PATHS, Selection
from loadtests.report.tables import EMULATED, MEASURED, PUBLISHED, Figure, Table
from loadtests.report.timeline import Timeline, draw

HERE = Path(__file__).parent
LETTERS = {PUBLISHED: "P", MEASURED: "M", EMULATED: "E"}
ORIGIN_TEXT = {
    PUBLISHED: "published by others",
    MEASURED: "measured here, real hardware",
    EMULATED: "measured here, simulated GPU",
}
ABSENT = '<span title="not measured">–</span>'


def page(
    title: str,
    lead: str,
    selection: Selection,
    found: Sequence[Conclusion],
    tables: Sequence[Table],
    timelines: Sequence[Timeline],
    facts: Sequence[tuple[str, str]],
) -> str:
    """The whole page."""
    body = [
        f'<p class="kicker">Blinkbed · {escape(selection.newest["when"][:10])}</p>',
        f'<h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>',
        legend(selection),
        "<h2>What follows from the numbers</h2>",
        claims(found),
        *(table_html(table) for table in tables[:-2]),
        charts(selection),
        *(table_html(table) for table in tables[-2:]),
        timeline_html(timelines),
        "<h2>How it was measured</h2>",
        facts_html(facts),
        "<footer>Made by <code>blinkbed report</code> from the results of "
        "<code>blinkbed compare</code>.</footer>",
    ]
    style, script = (HERE / "page.css").read_text(), (HERE / "page.js").read_text()
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + f'\n</main>\n<div id="tip" role="status"></div>\n<script>\n{script}</script>\n'
        "</body>\n</html>\n"
    )


def legend(selection: Selection) -> str:
    """How figures and paths are told apart."""
    origins = "".join(
        f'<span class="{origin}"><i>{letter}</i>{ORIGIN_TEXT[origin]}</span>'
        for origin, letter in LETTERS.items()
    )
    return f'<div class="legend" aria-label="Legend">{origins}</div>'


def claims(found: Sequence[Conclusion]) -> str:
    """The conclusions."""
    rows = "".join(
        f'<li><span class="verdict {one.verdict.replace(" ", "-")}">{one.verdict}</span>'
        f"<span>{escape(one.sentence)}</span></li>"
        for one in found
    )
    return f'<ul class="claims">{rows}</ul>'


def figure_html(figure: Figure | None) -> str:
    """A figure with the sign of its origin."""
    if figure is None:
        return ABSENT
    return (
        f'<span class="figure {figure.origin}" title="{ORIGIN_TEXT[figure.origin]}">'
        f"<i>{LETTERS[figure.origin]}</i>{escape(figure.text)}</span>"
    )


def table_html(table: Table) -> str:
    """A table under its title."""
    source = table.source
    head = ["<th></th>"]
    if source:
        head.append(
            f'<th class="theirs">{escape(source.name)}<br><small>{escape(source.where)}; '
            f"{escape(source.setting)}</small></th>"
        )
    head += [f'<th class="{column}">{column}</th>' for column in table.columns]
    rows = []
    for row in table.rows:
        cells = [f"<td>{escape(row.label)}</td>"]
        if source:
            cells.append(f'<td class="theirs">{figure_html(row.theirs) if row.theirs else ""}</td>')
        cells += [f"<td>{figure_html(row.ours[column])}</td>" for column in table.columns]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<h2>{escape(table.title)}</h2><p class="note">{escape(table.note)}</p>'
        f'<div class="wide"><table><thead><tr>{"".join(head)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def charts(selection: Selection) -> str:
    """Latency over load: TTFT and TPOT, idle and under interference, on shared scales."""
    panels = []
    for what, name in (("ttft_ms", "P99 TTFT"), ("tpot_ms", "P99 TPOT")):
        both = {
            pressed: {
                path: points
                for path in PATHS
                if (points := _points(selection, path, what, pressed))
            }
            for pressed in (False, True)
        }
        values = [y for series in both.values() for points in series.values() for _, y in points]
        if not values:
            continue
        scale = log_range(values)
        for pressed, series in both.items():
            if series:
                where = "under interference" if pressed else "idle"
                panels.append(line_chart(f"{name}, {where}", series, scale, "ms"))
    if not panels:
        return ""
    return (
        '<h2>Latency over load</h2><p class="note">Poisson arrivals, ShareGPT-like lengths, as '
        "clients see it. Both panels of a row share one logarithmic scale.</p>"
        f'<div class="panels">{"".join(f"<div>{panel}</div>" for panel in panels)}</div>'
    )


def _points(selection: Selection, path: str, what: str, pressed: bool) -> list[tuple[float, float]]:
    values = (
        (rate, selection.percentile(path, what, rate, interference=pressed))
        for rate in selection.rates
    )
    return [(rate, value) for rate, value in values if value]


def timeline_html(timelines: Sequence[Timeline]) -> str:
    """The step timeline."""
    if not timelines:
        return ""
    return (
        '<h2>Who works when</h2><p class="note">The same stretch of time in the middle of a run, '
        "path by path; warm gaps in the GPU's lane are idle time. The whole run is in trace.json, "
        f'for Perfetto or chrome://tracing.</p><div class="wide">{draw(timelines)}</div>'
    )


def facts_html(facts: Sequence[tuple[str, str]]) -> str:
    """Hardware, commit, configuration, what was emulated."""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in facts
    )
    return f'<div class="wide"><table class="facts"><tbody>{rows}</tbody></table></div>'
