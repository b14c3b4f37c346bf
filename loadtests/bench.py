"""``make bench``: run every benchmark, print one table with the hardware beside it.

Each benchmark is a module of its own, run as ``python -m loadtests.bench_ring``. It prints numbers
with their units in the keys: a line with a JSON object, or lines of a key and a number.

What the table shows of them, and the targets, is said here alone (``ROWS``).

A benchmark that fails is a line of the table, not the end of the others. Exit status 0 when all
of them ran, whether targets are met or not; the table says which are.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

Numbers = dict[str, float | int | str]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: which number of which benchmark, and its target (one of two)."""

    title: str
    benchmark: str
    key: str
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    def target(self) -> str:
        """The target as shown."""
        if self.at_most is not None:
            return f"<= {self.at_most:,g} {self.unit}"
        return "" if self.at_least is None else f">= {self.at_least:,g} {self.unit}"

    def holds(self, value: float) -> bool:
        """Whether a value meets the target."""
        low = float("-inf") if self.at_least is None else self.at_least
        high = float("inf") if self.at_most is None else self.at_most
        return low <= value <= high

    def cells(self, numbers: Numbers) -> tuple[str, str, str, str]:
        """Title, measured, target, verdict; a number that is not there is no success."""
        value = numbers.get(self.key)
        if not isinstance(value, int | float):
            return self.title, "failed", self.target(), "no"
        verdict = "yes" if self.holds(value) else "no"
        shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        return self.title, f"{shown} {self.unit}", self.target(), verdict if self.target() else ""


ROWS = (
    Row(
        "scheduler step, 256 running and 1,024 waiting, median",
        "bench_scheduler",
        "median_us",
        "us",
        at_most=10,
    ),
    Row(
        "record written to picked up by an idle poller, median",
        "bench_ring",
        "pickup_median_us",
        "us",
        at_most=20,
    ),
    Row(
        "ring throughput, 512-byte records, one producer",
        "bench_ring",
        "records_per_s",
        "records/s",
        at_least=200_000,
    ),
    Row("decode, batch 1", "bench_model", "decode, batch 1: tokens/s", "tokens/s"),
    Row(
        "decode, batch 1, against transformers generate",
        "bench_model",
        "decode, batch 1: ratio",
        "x",
        at_least=1.2,
    ),
    Row("decode, batch 8", "bench_model", "decode, batch 8: tokens/s", "tokens/s"),
    Row(
        "decode, batch 8, against transformers generate",
        "bench_model",
        "decode, batch 8: ratio",
        "x",
        at_least=1.4,
    ),
    Row(
        "SmartNIC streaming through HTTP, 64 streams",
        "bench_smartnic",
        "tokens_per_s",
        "tokens/s",
        at_least=25_000,
    ),
    Row(
        "SmartNIC CPU time per token",
        "bench_smartnic",
        "cpu_us_per_token",
        "us",
        at_most=30,
    ),
    Row(
        "memory of the device process beyond weights and KV",
        "bench_memory",
        "device_beyond_mb",
        "MB",
        at_most=600,
    ),
    Row("memory of the SmartNIC process", "bench_memory", "smartnic_mb", "MB", at_most=250),
    Row(
        "paced device against its profile, mean error",
        "bench_pace",
        "persistent_error_mean_percent",
        "%",
        at_most=1,
    ),
    Row("the same, p99", "bench_pace", "persistent_error_p99_percent", "%", at_most=5),
    Row(
        "paced 8B, batch 32, device idle: persistent",
        "bench_pace",
        "persistent_idle_percent",
        "%",
        at_most=0.5,
    ),
    Row("the same: async", "bench_pace", "async_idle_percent", "%", at_most=2),
    Row("the same: sync", "bench_pace", "sync_idle_percent", "%"),
    Row(
        "simulate, on one core",
        "bench_simulate",
        "persistent_requests_per_s",
        "requests/s",
        at_least=20_000,
    ),
)
BENCHMARKS = tuple(dict.fromkeys(row.benchmark for row in ROWS))
TIMEOUT_S = 900
RESULTS = Path("results")
EMULATED = (
    "the GPU (a process computing on this CPU), RDMA (shared memory), "
    "the SmartNIC's own cores (a process of this machine)"
)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Where and with what the figures were measured."""

    date: str
    commit: str
    processor: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    torch: str
    emulated: str = EMULATED

    @classmethod
    def of_this_machine(cls) -> Circumstances:
        """Read from the system; what cannot be known is "unknown"."""
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(
            date=time.strftime("%Y-%m-%d", time.gmtime()),
            commit=_commit(),
            processor=_processor(),
            cores=len(os.sched_getaffinity(0)),
            memory_gib=round(pages / 2**30, 1),
            kernel=platform.release(),
            python=platform.python_version(),
            torch=_version_of("torch"),
        )

    def sentence(self) -> str:
        """The circumstances in two lines."""
        return (
            f"Measured {self.date} at commit {self.commit} on {self.cores} cores of "
            f"{self.processor}, {self.memory_gib} GiB, Linux {self.kernel}, Python {self.python}, "
            f"torch {self.torch}.\nEmulated: {self.emulated}."
        )


def _commit() -> str:
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def run_benchmark(module: str) -> tuple[Numbers, str]:
    """The numbers of one benchmark, and why it failed ("" if it did not)."""
    command = [sys.executable, "-m", f"loadtests.{module}"]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, f"took longer than {TIMEOUT_S} s"
    if done.returncode:
        return {}, f"exit status {done.returncode}"
    numbers: Numbers = {}
    for line in done.stdout.splitlines():
        try:
            numbers.update(numbers_in(line))
        except ValueError:
            print(line, file=sys.stderr)
    return numbers, "" if numbers else "printed no numbers"


def numbers_in(line: str) -> Numbers:
    """The numbers of one line of a benchmark's output; raises ValueError if it has none."""
    if line.startswith("{"):
        found: Numbers = json.loads(line)
        return found
    key, _, value = line.strip().rpartition(" ")
    return {key.strip(): float(value)}


def table(numbers: Mapping[str, Numbers]) -> str:
    """A Markdown table of the rows whose benchmark was run."""
    rows = [("figure", "measured", "target", "met"), ("---", "---:", "---:", "---")]
    rows += [row.cells(numbers[row.benchmark]) for row in ROWS if row.benchmark in numbers]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(words: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench", description=__doc__)
    parser.add_argument("names", nargs="*", default=BENCHMARKS, help=f"of {', '.join(BENCHMARKS)}")
    names: Sequence[str] = parser.parse_args(words).names or BENCHMARKS
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {unknown[0]!r}; there is: {', '.join(BENCHMARKS)}")
    circumstances = Circumstances.of_this_machine()
    results: dict[str, Numbers] = {}
    problems: dict[str, str] = {}
    for name in names:
        print(f"running {name}", file=sys.stderr, flush=True)
        results[name], problem = run_benchmark(name)
        if problem:
            problems[name] = problem
    print(f"{table(results)}\n\n{circumstances.sentence()}")
    for name, problem in problems.items():
        print(f"{name} failed: {problem}", file=sys.stderr)
    RESULTS.mkdir(exist_ok=True)
    record = {**asdict(circumstances), "numbers": results, "problems": problems}
    (RESULTS / "bench.json").write_text(json.dumps(record, indent=2) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
