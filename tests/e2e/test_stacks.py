"""Stacks side by side, the fault command, and what becomes of a stack whose owner was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from compose.fault import heal, is_frozen
from compose.stack import ContainerStack, stacks, sweep
from tests.http_client import canary
from tests.server import wait_until

OWNER = """
import time
from tests.e2e.running import running_stack
with running_stack("shm", model="scripted") as stack:
    print(stack.project, flush=True)
    time.sleep(600)
"""


@contextmanager
def owner_of_a_stack() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process with a stack of its own, and the stack's name."""
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        project = owner.stdout.readline().strip()
        try:
            yield owner, project
        finally:
            owner.kill()
            if project:
                sweep(project)


def test_two_stacks_live_side_by_side_and_the_dead_ones_is_swept(
    scripted: ContainerStack,
) -> None:
    with owner_of_a_stack() as (owner, project):
        other = ContainerStack(project)
        assert other.url != scripted.url
        canary(other.url, within_s=10)
        canary(scripted.url, within_s=10)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert project in stacks()
        assert sweep(project) == [project]
        assert project not in stacks()
        canary(scripted.url, within_s=10)


def test_fault_command_breaks_for_a_time_and_heals(scripted: ContainerStack) -> None:
    command = [sys.executable, "-m", "compose.fault", "host-frozen", "--stack", scripted.project]
    with subprocess.Popen([*command, "--seconds", "3"], stdout=subprocess.PIPE) as fault:
        wait_until(lambda: is_frozen(scripted.container("host")), 10, "the host stands still")
        assert fault.wait(60) == 0
    assert not is_frozen(scripted.container("host"))
    heal(scripted)
    canary(scripted.url, within_s=10)


def test_fault_command_names_what_it_cannot_do(scripted: ContainerStack) -> None:
    command = [sys.executable, "-m", "compose.fault", "loss", "--stack", "no-such-stack"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"there is no stack 'no-such-stack'; running: {scripted.project}" in done.stderr
