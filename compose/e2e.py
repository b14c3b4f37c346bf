"""``python -m compose.e2e``: the end-to-end tests, from nothing to a summary.

Makes what is missing (engine, Compose, base image, wheelhouse, images), runs ``tests/e2e`` on the
best link that this host can do, removes every stack, ends the engine if it started it, and prints
what was found. Exit status: pytest's, or 1 when the run could not be made.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from compose import debian, link_choice, summary
from compose.docker import Engine, environment
from compose.images import build
from compose.paths import REPOSITORY, TOOLS
from engine.child import die_with
from engine.errors import UserError

REPORT = REPOSITORY / "results" / "e2e.json"
TESTS_TIMEOUT_S = 900.0


class E2eError(UserError):
    """The run could not be made."""


def say(line: str) -> None:
    """One line of progress, with the time since the start."""
    print(f"e2e {time.monotonic() - _started_s:5.0f} s: {line}", flush=True)


_started_s = time.monotonic()


@contextmanager
def _alone() -> Iterator[None]:
    """One run of a checkout at a time: runs sweep each other's stacks."""
    TOOLS.mkdir(parents=True, exist_ok=True)
    with (TOOLS / "e2e.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise E2eError("another end-to-end run of this checkout is under way") from None
        yield


def run_tests(link: str, reason: str, words: Sequence[str]) -> int:
    """pytest's exit status; its report is at REPORT."""
    REPORT.unlink(missing_ok=True)
    variables = {
        "BLINKBED_E2E_LINK": link,
        "BLINKBED_E2E_REASON": reason,
        "BLINKBED_LINK_REASON": reason,
        "BLINKBED_E2E_REPORT": str(REPORT),
        "TESTCONTAINERS_RYUK_DISABLED": "true",  # stacks are swept by label instead
    }
    command = [sys.executable, "-m", "pytest", "tests/e2e", *words]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **environment(), **variables},
        preexec_fn=die_with(os.getpid()),
    )
    try:
        return process.wait(TESTS_TIMEOUT_S)
    except BaseException as error:
        process.terminate()
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            limit_s = TESTS_TIMEOUT_S
            raise E2eError(f"the tests took longer than {limit_s:.0f} s and were ended") from None
        raise


def _sweep() -> None:
    from tests.e2e.running import sweep_left_behind

    for project in sweep_left_behind():
        say(f"removed the stack {project}")


def _install_tools(link: str) -> None:
    """What the emulated machines are tried out with, and what dissects their packets."""
    wanted = {"qemu-system-x86_64": "qemu-system-x86", "tshark": "tshark"}
    missing = [package for tool, package in wanted.items() if shutil.which(tool) is None]
    if missing and link in ("auto", "vm") and debian.can_install():
        say(f"installing {', '.join(missing)}")
        debian.install(missing, purpose="the link vm")


def print_summary(path: Path) -> None:
    """What the tests have found, if they came so far."""
    if path.is_file():
        print("\n".join(["", *summary.lines(json.loads(path.read_text())), f"report: {path}"]))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compose.e2e", description=__doc__)
    parser.add_argument("--link", choices=link_choice.CHOICES, default="auto")
    parser.add_argument("--no-build", action="store_true", help="take the images as they are")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, after --")
    arguments = parser.parse_args(words)
    try:
        with _alone(), Engine():
            _install_tools(arguments.link)
            link, reason = link_choice.choose(arguments.link)
            say(f"link {link}: {reason}")
            if link == "vm":
                os.environ.update(link_choice.accelerator())
            if not arguments.no_build:
                build(say)
            try:
                status = run_tests(link, reason, arguments.pytest)
            finally:
                _sweep()
        print_summary(REPORT)
        say(f"over, exit status {status}")
    except UserError as error:
        print(f"blinkbed: {error}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
