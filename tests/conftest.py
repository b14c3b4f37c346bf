"""Fixtures shared by all tests, and CI's rule that nothing is skipped for want of a capability."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from tests.server import Server, start_server

# What CI's machines do not have. Any other skip there means that a capability is missing.
MAY_BE_MISSING_IN_CI = re.compile(r"nvcc|CuPy|CUDA|GPU", re.IGNORECASE)


@pytest.fixture(scope="session")
def scripted_server() -> Iterator[Server]:
    """A server of the scripted model, shared by all tests that leave it as it was."""
    with start_server(model="scripted", debug_scheduler=True) as server:
        yield server


@pytest.fixture(scope="session")
def smollm2_server() -> Iterator[Server]:
    """A server of the default model, shared by all tests that leave it as it was."""
    with start_server(model="smollm2", debug_scheduler=True) as server:
        yield server


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test was skipped."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr)


def forbidden_skips(reporter: pytest.TerminalReporter) -> list[str]:
    """Reasons of skipped tests that CI's machines have no excuse for."""
    reasons = (skip_reason(report) for report in reporter.stats.get("skipped", ()))
    return [reason for reason in reasons if not MAY_BE_MISSING_IN_CI.search(reason)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI a skip for want of something that CI should have fails the run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and isinstance(reporter, pytest.TerminalReporter):
        reasons = forbidden_skips(reporter)
        if reasons and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            for reason in sorted(set(reasons)):
                reporter.write_line(f"\nCI must be able to do this: {reason}", red=True)
