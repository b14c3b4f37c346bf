"""``blinkbed report``: the page, its Markdown, and the trace, from the results of a comparison."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from engine.errors import UserError
from loadtests.compare.cell import Cell
from loadtests.compare.store import read_results
from loadtests.report.conclusions import conclusions
from loadtests.report.h200 import h200_table
from loadtests.report.markdown import markdown
from loadtests.report.page import page
from loadtests.report.selection import PATHS, Selection
from loadtests.report.tables import Tables, percent
from loadtests.report.timeline import Timeline, read_timeline, trace

INPUT, OUTPUT = Path("results/compare.jsonl"), Path("results/report.html")
TITLE = "Who drives the loop, and what does it cost?"
LEAD = (
    "One serving engine, three ways to drive it: a host that takes turns with the GPU (sync), a "
    "host that plans one step ahead (async), and a GPU that schedules itself (persistent)."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--input", type=Path, default=INPUT, help=f"default: {INPUT}")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"default: {OUTPUT}")


def run(arguments: argparse.Namespace) -> int:
    """Carry the command out; raises UserError where there are no results."""
    source: Path = arguments.input
    if not source.exists():
        raise UserError(f"{source} is not there: run `blinkbed compare` first")
    results = read_results(source)
    if not results:
        raise UserError(f"{source} has no results: run `blinkbed compare` first")
    for file in write(Selection(results), timelines_beside(source), arguments.output):
        print(f"report: {file}", file=sys.stderr)
    return 0


def timelines_beside(source: Path) -> list[Timeline]:
    """Those that a comparison left beside its results, in the order of the paths."""
    files = (source.parent / f"timeline-{path}.json" for path in PATHS)
    return [read_timeline(file) for file in files if file.exists()]


def write(selection: Selection, timelines: list[Timeline], output: Path) -> list[Path]:
    """Write page, Markdown and trace; their paths."""
    found, facts = conclusions(selection), facts_of(selection)
    made = Tables(selection)
    tables = [made.async_batching(), made.cpu_free(), made.frozen(), made.counter_measures()]
    if selection.is_emulated and (real := h200_table()) is not None:
        tables.insert(2, real)
    output.parent.mkdir(parents=True, exist_ok=True)
    files = [output, output.with_suffix(".md")]
    files[0].write_text(page(TITLE, LEAD, selection, found, tables, timelines, facts))
    files[1].write_text(markdown(TITLE, LEAD, found, tables, facts))
    if timelines:
        files.append(output.parent / "trace.json")
        files[2].write_text(json.dumps(trace(timelines)))
    return files


def facts_of(selection: Selection) -> list[tuple[str, str]]:
    """Name and text of what a reader must know of the measurement."""
    newest = selection.newest
    machine, configuration = newest["hardware"], newest["configuration"]
    cpus = configuration["cpus"]
    pressures = {one.get("interference", "none") for one in selection.results} - {"none"}
    facts = [
        (
            "Machine",
            f"{machine['cpu']}, {machine['num_cpus']} CPUs, {machine['memory_gib']} GiB, Linux "
            f"{machine['kernel']}, GPU: {machine['gpu'] or 'none'}",
        ),
        ("Commit", ", ".join(selection.commits)),
        ("Model", configuration["model"]),
        ("CPU sets", ", ".join(f"{role} {text}" for role, text in cpus.items())),
        ("Interference", "; ".join(sorted(pressures)) or "none was measured"),
        ("Noise", f"differences of throughput up to {percent(selection.noise)} are not told apart"),
    ]
    if newest.get("link"):
        facts.append(("Link", f"{newest['link']} ({newest['link_reason']})"))
        facts.append(("Window", newest["window"]))
        facts.append(("Pace", newest["pace"]))
        facts += [(f"Role: {role}", text) for role, text in newest["emulated"].items()]
    facts += [
        (f"Not valid: {Cell(**one['cell']).title}", "; ".join(one["reasons"]))
        for one in selection.invalid
    ]
    if selection.others:
        facts.append(
            (
                "Left out",
                f"{selection.others} results of another configuration or commit than the last",
            )
        )
    return facts
