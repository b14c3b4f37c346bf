"""``blinkbed simulate``: the scheduler over a trace in virtual time, path by path."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.cli import Flag, flags_of
from engine.config import RingConfig, SchedulerConfig
from engine.errors import UserError
from engine.model.pace import Pace
from engine.section import Section
from engine.simulate.costs import Costs, Samples, no_costs
from engine.simulate.simulation import DEPTHS, Result, Setup, simulate
from engine.workload import LengthTable, Requests, poisson_requests, trace_requests

NO_COSTS = "none"
ENDS = ("length", "eos")
MAX_REQUESTS = 10**9
SECTIONS: dict[str, Section] = {
    "ring": RingConfig(num_slots=256, token_ring_entries=65536),
    "scheduler": SchedulerConfig(
        num_pages=16384, max_running=64, max_step_tokens=2048, max_context=6144
    ),
}
"""Defaults of an engine on a GPU, as `blinkbed compare` starts it."""
COLUMNS = (
    *("path", "arrivals/s", "tokens/s", "TTFT p50", "p90", "p99", "TPOT p50", "p90", "p99"),
    *("ITL p50", "p90", "p99", "busy %", "gap %", "steps/s of CPU", "requests/s of CPU"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add = parser.add_argument
    add("--paths", default=",".join(DEPTHS), help="default: %(default)s")
    add("--profile", default="8b-h200", help="of the GPU's steps, or a file (default: %(default)s)")
    add(
        "--costs",
        default="sim",
        help="of the paths, or a file of loadtests.measure_costs; none: they take no time "
        "(default: %(default)s)",
    )
    add("--rates", default="16", help="Poisson arrivals, requests/s (default: %(default)s)")
    add("--requests", type=int, default=20000, help="how many arrive (default: %(default)s)")
    add("--trace", type=Path, help="JSONL of requests, in place of --rates and --requests")
    add("--seed", type=int, default=1, help="default: %(default)s")
    add("--link-us", type=float, default=0.0, help="what the link adds, each way")
    add("--ends", default="length", choices=ENDS, help="by max_tokens, or by an EOS none foresees")
    add("--json", type=Path, metavar="FILE", help="write the results there, too")
    groups = {name: parser.add_argument_group(name) for name in SECTIONS}
    for flag in _section_flags():
        flag.add_to(groups[flag.keys[0]])


def _section_flags() -> Iterator[Flag]:
    for name, section in SECTIONS.items():
        for flag in flags_of(type(section), (name,)):
            if flag.keys[-1] != "num_ports":
                yield dataclasses.replace(flag, default=getattr(section, flag.keys[-1]))


def _sections(arguments: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for flag in _section_flags():
        key = ".".join(flag.keys)
        if hasattr(arguments, key):
            given[flag.keys[0]][flag.keys[1]] = getattr(arguments, key)
    return {name: SECTIONS[name].replace(**values) for name, values in given.items()}


@dataclass(frozen=True, slots=True)
class Run:
    """A result, the load that it is of, and the processor time that it took."""

    rate_per_s: float | None
    result: Result
    cpu_s: float

    def to_mapping(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rate_per_s": self.rate_per_s,
            "cpu_s": round(self.cpu_s, 4),
            **self.result.to_mapping(),
        }

    def cells(self) -> list[str]:
        """A line of the table; times in ms."""
        one = self.result
        rate = "trace" if self.rate_per_s is None else f"{self.rate_per_s:g}"
        spreads = (one.ttft_ms, one.tpot_ms, one.itl_ms)
        times = [f"{spread[rank]:.2f}" for spread in spreads for rank in ("p50", "p90", "p99")]
        shares = [f"{100 * share:.2f}" for share in (one.busy_share, one.gap_share)]
        speeds = [f"{count / self.cpu_s:,.0f}" for count in (one.num_steps, one.num_requests)]
        return [one.path, rate, f"{one.tokens_per_s:,.0f}", *times, *shares, *speeds]


def run(arguments: argparse.Namespace) -> int:
    """Carry the command out; raises UserError in one sentence."""
    pace = Pace.load(arguments.profile)
    costs = None if arguments.costs == NO_COSTS else Costs.load(arguments.costs)
    sections = _sections(arguments)
    how = "measured" if pace.measured else "estimated"
    print(f"steps as on {pace.hardware} ({pace.name}, {how} {pace.date})")
    print(
        f"paths as on {costs.hardware} ({costs.name}, {costs.date}: {costs.what})"
        if costs
        else "paths that take no time of their own"
    )
    runs = []
    for path in _words(arguments.paths):
        for rate_per_s in _rates(arguments):
            runs.append(_one(arguments, path, rate_per_s, pace, costs, sections))
    print_table([run.cells() for run in runs])
    for one in runs:
        if one.result.num_delayed:
            print(
                f"{one.result.path}: {one.result.num_delayed} requests found every slot taken and "
                "waited before the ring (a SmartNIC would refuse them)"
            )
    if arguments.json:
        _write(arguments, pace, costs, sections, runs)
    return 0


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in DEPTHS:
            raise UserError(f"--paths: no {word!r} among {', '.join(DEPTHS)}")
    return words


def _rates(arguments: argparse.Namespace) -> list[float | None]:
    if arguments.trace is not None:
        return [None]
    try:
        rates: list[float | None] = [float(word) for word in arguments.rates.split(",")]
    except ValueError:
        raise UserError(f"--rates: {arguments.rates!r} is not a list of numbers") from None
    if not all(rate is not None and 1e-3 <= rate <= 1e6 for rate in rates):
        raise UserError("--rates: requests/s must lie between 0.001 and 1000000")
    if not 1 <= arguments.requests <= MAX_REQUESTS:
        raise UserError(f"--requests: must lie between 1 and {MAX_REQUESTS}")
    if arguments.seed < 0:
        raise UserError("--seed: must be 0 or more")
    return rates


def _one(
    arguments: argparse.Namespace,
    path: str,
    rate_per_s: float | None,
    pace: Pace,
    costs: Costs | None,
    sections: dict[str, Any],
) -> Run:
    if not 0 <= arguments.link_us <= 1e7:
        raise UserError("--link-us: must lie between 0 and ten million")
    samples: Samples = no_costs() if costs is None else costs.samples(path)
    setup = Setup(
        path=path,
        **sections,
        pace=pace,
        costs=samples,
        seed=arguments.seed,
        link_us=arguments.link_us,
        ends_by_eos=arguments.ends == "eos",
    )
    began_s = time.process_time()
    result = simulate(setup, _requests(arguments, rate_per_s, setup.scheduler.max_context))
    return Run(rate_per_s, result, max(time.process_time() - began_s, 1e-9))


def _requests(
    arguments: argparse.Namespace, rate_per_s: float | None, max_context: int
) -> Iterator[Requests]:
    if rate_per_s is None:
        return trace_requests(arguments.trace, max_context=max_context)
    return poisson_requests(rate_per_s, arguments.requests, arguments.seed, max_context=max_context)


def print_table(rows: list[list[str]]) -> None:
    """Columns as wide as they must be; times in ms."""
    lines = [list(COLUMNS), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _write(
    arguments: argparse.Namespace,
    pace: Pace,
    costs: Costs | None,
    sections: dict[str, Any],
    runs: list[Run],
) -> None:
    written = {
        "simulated": True,
        "profile": {key: getattr(pace, key) for key in ("name", "hardware", "measured", "date")},
        "costs": costs
        and {key: getattr(costs, key) for key in ("name", "hardware", "what", "date")},
        "load": {
            "trace": arguments.trace and str(arguments.trace),
            "lengths": None if arguments.trace else LengthTable.load().name,
            "seed": arguments.seed,
            "link_us": arguments.link_us,
            "ends": arguments.ends,
        },
        "configuration": {name: json.loads(one.to_json()) for name, one in sections.items()},
        "runs": [run.to_mapping() for run in runs],
    }
    try:
        arguments.json.write_text(json.dumps(written, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {arguments.json}: {error.strerror}") from error
