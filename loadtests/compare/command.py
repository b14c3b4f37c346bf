"""``blinkbed compare``: runs the grid and writes a line a cell; what is there is skipped."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from emulation.counter_measures import MEASURES
from emulation.cpu_split import CpuSplit
from emulation.interference import MAKERS, Interference
from engine.cli import flags_of
from engine.config import LINKS, PATHS, ServeConfig
from engine.errors import UserError
from engine.ready import ReadyLine
from engine.stack import Stack
from loadtests.compare.bar import Bar
from loadtests.compare.cell import KINDS, Cell, key_of
from loadtests.compare.grid import Grid
from loadtests.compare.measure import measure_cell
from loadtests.compare.observe import server_info
from loadtests.compare.store import SCHEMA, Store, commit, hardware

OUTPUT = Path("results/compare.jsonl")
READY_TIMEOUT_S = 900.0
LASTING = ("huge-pages",)
"""Counter-measures that cannot be undone on a running host."""
ALL_PATHS = ("sync", "async", "persistent")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"default: {OUTPUT}")
    parser.add_argument("--model", default="paced:8b-h200", help="default: %(default)s")
    parser.add_argument("--device", default="sim", choices=("sim", "cuda"))
    parser.add_argument("--link", default="shm", choices=LINKS, help="default: %(default)s")
    parser.add_argument("--paths", default=",".join(ALL_PATHS), help="default: %(default)s")
    parser.add_argument("--parts", default=",".join(KINDS), help="default: %(default)s")
    parser.add_argument(
        "--rates", default="", help="requests/s of the Poisson arrivals (default: 4,8,16)"
    )
    parser.add_argument(
        "--measures",
        default="",
        help=f"counter-measures, tried under interference (default: {','.join(MEASURES)}; none)",
    )
    parser.add_argument("--interference", default="auto", choices=MAKERS, help="who makes it")
    parser.add_argument("--per-cpu", type=int, default=1, help="burners of each kind and CPU")
    parser.add_argument(
        "--device-first",
        action=argparse.BooleanOptionalAction,
        help="the device before SmartNIC and client (default: with a paced model)",
    )
    parser.add_argument("--batch", type=int, default=32, help="streams of steady decode")
    parser.add_argument("--context", type=int, default=6144, help="most tokens of a request")
    parser.add_argument("--load-s", type=float, default=0.0, help="time of a load cell")
    parser.add_argument("--steady-s", type=float, default=0.0, help="time of a steady cell")
    parser.add_argument("--frozen-s", type=float, default=0.0, help="time that the host stands")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a small grid, to see that it works")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    parser.add_argument("--serve", default="", help="more words for `blinkbed serve`")


def grid_of(arguments: argparse.Namespace) -> Grid:
    """The grid that the flags ask for; raises UserError in one sentence."""
    quick = arguments.quick
    measures = arguments.measures or ("none" if quick else ",".join(MEASURES))
    grid = Grid(
        paths=_words("--paths", arguments.paths, ALL_PATHS),
        rates_per_s=_numbers("--rates", arguments.rates or ("4" if quick else "4,8,16")),
        measures=[] if measures == "none" else _words("--measures", measures, tuple(MEASURES)),
        measure_rate_per_s=0.0,
        load_s=arguments.load_s or (3.0 if quick else 12.0),
        steady_s=arguments.steady_s or (2.0 if quick else 6.0),
        frozen_s=arguments.frozen_s or (2.0 if quick else 10.0),
        batch=arguments.batch,
        parts=_words("--parts", arguments.parts, KINDS),
        seed=arguments.seed,
    )
    middle = sorted(grid.rates_per_s)[len(grid.rates_per_s) // 2]
    return Grid(**{**_fields(grid), "measure_rate_per_s": middle})


def _fields(grid: Grid) -> dict[str, Any]:
    return {name: getattr(grid, name) for name in grid.__dataclass_fields__}


def _words(flag: str, text: str, known: tuple[str, ...]) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise UserError(f"{flag}: no {word!r} among {', '.join(known)}")
    if not words:
        raise UserError(f"{flag}: names nothing")
    return words


def _numbers(flag: str, text: str) -> list[float]:
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"{flag}: {text!r} is not a list of numbers") from None
    if not all(0 < number <= 10000 for number in numbers):
        raise UserError(f"{flag}: rates must lie between 0 and 10000")
    return numbers


class Comparison:
    """One run of the command."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._grid = grid_of(arguments)
        self._split = CpuSplit.of(os.sched_getaffinity(0))
        self._store = Store(arguments.output)
        self._commit, self._hardware = commit(), hardware()
        self._stack: Stack | None = None
        self._path = ""
        self._pace = ""
        self._is_tainted = False

    def run(self) -> int:
        """All cells; 1 if one of them could not be measured or must not be believed."""
        cells = self._cells_to_do()
        self._say_plan(cells)
        bar = Bar(len(cells))
        bad = 0
        try:
            for cell in cells:
                bar.begin(cell.title)
                result = self._one(cell)
                self._store.add(result)
                bad += not result["valid"]
                for reason in result["reasons"]:
                    bar.say(f"NOT VALID {cell.title}: {reason}")
                bar.end(_summary(result))
        finally:
            self._close()
        say(f"{self._arguments.output}: {len(self._store.results)} results, {bad} not valid")
        return 1 if bad else 0

    def _cells_to_do(self) -> list[Cell]:
        missing = [path for path in self._grid.paths if path not in PATHS]
        for path in missing:
            say(f"path {path} is not in this build: left out")
        cells = [cell for cell in self._grid.cells() if cell.path not in missing]
        if not any(flag.name == "timeline" for flag in flags_of(ServeConfig)):
            say("serve --timeline is not in this build: no timelines")
            cells = [cell for cell in cells if cell.kind != "timeline"]
        if self._arguments.again:
            return cells
        todo = [cell for cell in cells if not self._store.has(self._key(cell))]
        if len(todo) < len(cells):
            say(f"{len(cells) - len(todo)} of {len(cells)} cells are measured already: skipped")
        return todo

    def _say_plan(self, cells: list[Cell]) -> None:
        pressure = Interference(
            self._split.host, 1.0, maker=self._arguments.interference, per_cpu=self._per_cpu
        )
        say(f"CPUs: {self._split.description}")
        say(f"interference by {pressure.description}")
        say(f"{len(cells)} cells, commit {self._commit}, into {self._arguments.output}")

    @property
    def _per_cpu(self) -> int:
        return int(self._arguments.per_cpu)

    @property
    def _device_first(self) -> bool:
        given = self._arguments.device_first
        return str(self._arguments.model).startswith("paced") if given is None else bool(given)

    def _configuration(self) -> dict[str, Any]:
        given = self._arguments
        return {
            "model": given.model,
            "device": given.device,
            "link": given.link,
            "serve": given.serve,
            "interference": given.interference,
            "per_cpu": self._per_cpu,
            "device_first": self._device_first,
            "cpus": self._split.to_dict(),
            "max_context": given.context,
            "lengths": "sharegpt-like",
        }

    def _key(self, cell: Cell) -> str:
        return key_of(cell, self._configuration(), self._commit)

    def _one(self, cell: Cell) -> dict[str, Any]:
        base = {
            "schema": SCHEMA,
            "key": self._key(cell),
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "commit": self._commit,
            "hardware": self._hardware,
            "cell": cell.to_dict(),
            "configuration": self._configuration(),
        }
        try:
            ready = self._stack_for(cell)
            facts = self._facts(ready)
            found = measure_cell(
                cell,
                ready,
                self._split,
                maker=self._arguments.interference,
                per_cpu=self._per_cpu,
                context=self._arguments.context,
            )
            self._is_tainted = cell.measure in LASTING
            if cell.kind == "timeline":
                self._close()  # the host writes the timeline when it drains
                file = timeline_file(self._arguments.output, cell.path)
                found["timeline"] = file.name if file.exists() else None
            return {**base, **facts, **found}
        except (UserError, OSError, RuntimeError) as error:
            self._close()
            return {**base, "figures": None, "valid": False, "reasons": [str(error)]}

    def _facts(self, ready: ReadyLine) -> dict[str, Any]:
        info = server_info(ready.url)
        return {
            "link": ready.link,
            "link_reason": info.get("link_reason", ""),
            "window": ready.window,
            "pace": self._pace,
            "emulated": emulated(ready),
        }

    def _stack_for(self, cell: Cell) -> ReadyLine:
        """The running stack, if it fits, else a new one."""
        fits = self._path == cell.path and cell.kind != "timeline"
        if self._is_tainted and cell.measure not in LASTING:
            fits = False
        if self._stack is not None and fits:
            assert self._stack.ready is not None
            return self._stack.ready
        self._close()
        given = self._arguments
        words = [
            *("--port", "0", "--model", given.model, "--path", cell.path),
            *("--device", given.device, "--link", given.link),
            *(
                "--max-context",
                str(given.context),
                "--max-running",
                "64",
                "--max-step-tokens",
                "2048",
            ),
            *("--num-pages", "16384", "--ring-slots", "256", "--token-ring-entries", "65536"),
            *("--heartbeat-timeout-s", "120", "--drain-timeout-s", "5"),
            *given.serve.split(),
        ]
        if cell.kind == "timeline":
            file = timeline_file(given.output, cell.path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)
            words += ["--timeline", str(file.absolute())]
        self._stack = Stack(words)
        self._path = cell.path
        ready = self._stack.wait_ready(READY_TIMEOUT_S)
        self._pace = self._split.apply(ready, device_first=self._device_first)
        return ready

    def _close(self) -> None:
        if self._stack is not None:
            self._stack.close()
            self._stack = None


def timeline_file(output: Path, path: str) -> Path:
    """Where the timeline of a path lies: beside the results."""
    return output.parent / f"timeline-{path}.json"


def emulated(ready: ReadyLine) -> dict[str, str]:
    """By role: what was real, what stood in for it."""
    gpu = "real GPU" if ready.device == "cuda" else "simulated GPU (a process)"
    if ready.model.startswith("paced"):
        gpu += f", steps at the pace of {ready.model.partition(':')[2] or 'a profile'}"
    links = {
        "shm": "shared memory instead of RDMA",
        "vm": "true RDMA (Soft-RoCE) between emulated machines",
        "rxe": "true RDMA (Soft-RoCE) of this kernel",
    }
    return {
        "gpu": gpu,
        "smartnic": "a process on this machine",
        "link": links.get(ready.link, ready.link),
        "host": "real process on this machine",
        "interference": "real load on the host's CPUs",
    }


def _summary(result: dict[str, Any]) -> str:
    found = result["figures"]
    if found is None:
        why = result.get("measure", {}).get("how") or "; ".join(result["reasons"])
        return f"not measured: {why}"
    parts = [f"{found['tokens_per_s']:.0f} tokens/s"]
    if found["ttft_ms"] and result["cell"]["kind"] == "load":
        parts.append(f"TTFT p99 {found['ttft_ms']['p99']:.1f} ms")
        parts.append(f"TPOT p99 {(found['tpot_ms'] or {'p99': 0})['p99']:.2f} ms")
    if found["gap_share"] is not None:
        parts.append(f"idle between steps {100 * found['gap_share']:.2f} %")
    if "gap_frozen_ms" in found:
        parts.append(f"longest gap {found['gap_frozen_ms']} ms ({found['gap_before_ms']} before)")
    return ", ".join(parts)


def say(text: str) -> None:
    """A line for people."""
    print(f"compare: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends us as Ctrl-C does, so that stack and burners are closed."""
    import signal

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(arguments: argparse.Namespace) -> int:
    """Carry the command out."""
    with _terminated_as_interrupted():
        return Comparison(arguments).run()
