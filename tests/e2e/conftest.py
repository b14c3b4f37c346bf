"""Fixtures of the end-to-end tests: stacks of containers on the link that BLINKBED_E2E_LINK names.

`make e2e` runs them; a plain `pytest` does not collect them, for they need images and an engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from compose import guest
from compose.stack import ContainerStack
from tests.e2e.report import REPORT_VARIABLE, Report
from tests.e2e.running import running_stack, sweep_left_behind
from tests.http_client import get, metrics

LINK_VARIABLE = "BLINKBED_E2E_LINK"
REASON_VARIABLE = "BLINKBED_E2E_REASON"
RDMA_COUNTERS = "/sys/class/infiniband/rxe0/ports/1/hw_counters"
_report = pytest.StashKey[Report]()

if LINK_VARIABLE not in os.environ:
    collect_ignore_glob = ["test_*.py"]
elif os.environ[LINK_VARIABLE] != "vm":
    collect_ignore_glob = ["test_wire.py"]


def pytest_configure(config: pytest.Config) -> None:
    link = os.environ.get(LINK_VARIABLE, "shm")
    config.stash[_report] = Report(link, os.environ.get(REASON_VARIABLE, "asked for"))


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest) -> Report:
    """What goes into the summary."""
    return request.config.stash[_report]


@pytest.fixture(scope="session")
def link(report: Report) -> str:
    """The link under test: shm, rxe or vm."""
    return report.link


@pytest.fixture(scope="session", autouse=True)
def _clean() -> Iterator[None]:
    """Nothing is there at the start, whatever an earlier run left, and nothing at the end."""
    sweep_left_behind()
    yield
    sweep_left_behind()


@pytest.fixture(scope="module")
def smollm2(link: str, report: Report) -> Iterator[ContainerStack]:
    """The default model."""
    with running_stack(link, model="smollm2") as stack:
        yield stack
        report.add_counters(counters(stack))


@pytest.fixture(scope="module")
def scripted(link: str, report: Report) -> Iterator[ContainerStack]:
    """A model that repeats its prompt, on a small token ring, which fills at once."""
    # The second port is for attacks.
    with running_stack(
        link,
        model="scripted",
        num_ports=2,
        token_ring_entries=1024,
        max_running=32,
        max_context=8192,
    ) as stack:
        report.server.update(server_info(stack.url))
        yield stack
        report.add_counters(counters(stack))


def server_info(url: str) -> dict[str, object]:
    """/server_info, or nothing."""
    response = get(url, "/server_info")
    return dict(response.json()) if response.status_code == 200 else {}


def counters(stack: ContainerStack) -> dict[str, float]:
    """What SmartNIC and Soft-RoCE have counted."""
    found = {
        name: value
        for name, value in metrics(stack.url).items()
        if name.startswith("blinkbed_rdma")
    }
    for container in guest.machines(stack):
        for line in guest.run(container, "grep", "-r", ".", RDMA_COUNTERS).splitlines():
            path, _, value = line.rpartition(":")
            found[f"{container.role} {Path(path).name}"] = float(value)
    return found


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid.rpartition("/")[2]] = report.outcome


_outcomes: dict[str, str] = {}


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = os.environ.get(REPORT_VARIABLE)
    if path and LINK_VARIABLE in os.environ:
        session.config.stash[_report].tests.update(_outcomes)
        session.config.stash[_report].write(Path(path))
