"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from loadtests.report.conclusions import Conclusion
from loadtests.report.tables import EMULATED, MEASURED, PUBLISHED, Figure, Table

SIGNS = {PUBLISHED: "(published)", MEASURED: "", EMULATED: "(emulated)"}


def markdown(
    title: str,
    lead: str,
    found: Sequence[Conclusion],
    tables: Sequence[Table],
    facts: Sequence[tuple[str, str]],
) -> str:
    """The whole text. Figures without a sign were measured on real hardware."""
    lines = [f"# {title}", "", lead, "", "## What follows", ""]
    lines += [f"- **{one.verdict}**: {one.sentence}" for one in found]
    for table in tables:
        lines += ["", f"## {table.title}", "", table.note, ""]
        lines += _rows(table)
    lines += ["", "## How it was measured", "", "| | |", "| --- | --- |"]
    lines += [f"| {_plain(name)} | {_plain(text)} |" for name, text in facts]
    lines += [
        "",
        "Figures marked (published) are others'; (emulated) were measured here with a simulated "
        "GPU; those without a mark were measured on real hardware.",
        "",
    ]
    return "\n".join(lines)


def _rows(table: Table) -> list[str]:
    theirs = f"published: {table.source.name}, {table.source.where}" if table.source else ""
    head = ["", *([theirs] if theirs else []), *table.columns]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
    for row in table.rows:
        cells = [_plain(row.label), *([_text(row.theirs)] if theirs else [])]
        cells += [_text(row.ours[column]) for column in table.columns]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _text(figure: Figure | None) -> str:
    return "–" if figure is None else f"{figure.text} {SIGNS[figure.origin]}".strip()


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
