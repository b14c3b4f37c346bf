"""The scheduler built with sanitizers, driven by the same traces in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import native
from engine.ring_library import CSRC

HERE = Path(__file__).parent

ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g")
# Without optimisation: threads are compared by the call sites at which they meet.
THREAD = ("-fsanitize=thread", "-O0", "-g")


def sanitized_python(runtime: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment of an interpreter with the sanitizer's runtime; skips without one."""
    library = subprocess.run(
        [*native.find_compiler(), f"-print-file-name={runtime}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip(f"the compiler has no {runtime}")
    environment = os.environ | {
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    # The thread sanitizer's shadow memory may not agree with randomised addresses.
    for prefix in ([], ["setarch", "-R"]):
        command = [*prefix, sys.executable]
        try:
            done = subprocess.run(
                [*command, "-c", "import ctypes"], env=environment, capture_output=True, check=False
            )
        except FileNotFoundError:
            continue
        if done.returncode == 0:
            return command, environment
    pytest.skip(f"this kernel does not run Python under {runtime}")


def run_sanitized(runtime: str, library: Path, module: str, rounds: int) -> None:
    command, environment = sanitized_python(runtime)
    done = subprocess.run(
        [*command, "-m", module, str(library), str(rounds)],
        cwd=HERE.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


@pytest.mark.parametrize(
    ("module", "rounds"), [("tests.hostile_ring", 6), ("tests.scheduler_traces", 4)]
)
def test_nothing_is_touched_out_of_bounds(module: str, rounds: int) -> None:
    library = native.build_library(
        [CSRC / "scheduler_host.cpp"],
        include_dirs=[CSRC],
        extra_flags=ADDRESS,
        name="scheduler-asan",
    )
    run_sanitized("libasan.so", library, module, rounds)


@pytest.mark.parametrize(
    ("module", "rounds"), [("tests.hostile_ring", 1), ("tests.scheduler_traces", 1)]
)
def test_a_team_of_threads_plans_the_same_without_a_race(module: str, rounds: int) -> None:
    """Three threads in step, as a GPU's block: the twin's plans, met in the same places."""
    library = native.build_library(
        [HERE / "csrc" / "scheduler_team.cpp"],
        include_dirs=[CSRC, HERE / "csrc"],
        defines={"BB_TEAM_HEADER": '"team_threads.h"'},
        extra_flags=THREAD,
        name="scheduler-tsan",
    )
    run_sanitized("libtsan.so", library, module, rounds)
