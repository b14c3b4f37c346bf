"""``blinkbed bench``: the benchmark table, or the RDMA link between emulated machines."""

from __future__ import annotations

import argparse

from loadtests import bench, bench_link


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument(
        "what",
        nargs="*",
        metavar="NAME",
        help=f"link (two emulated machines, beside rdma-core's own tools), or of "
        f"{', '.join(bench.BENCHMARKS)} (default: all of these)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Carry the command out."""
    if arguments.what == ["link"]:
        return bench_link.main()
    return bench.main(arguments.what)
