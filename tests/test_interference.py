"""Interference presses on the given CPUs only, ends in time, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulation.counter_measures import MEASURES, measure_applied
from emulation.cpu_split import CpuSplit, cpu_text
from emulation.interference import KINDS, Interference, InterferenceError, choose_maker
from engine.errors import UserError
from tests.server import is_alive, wait_until

CPU = min(os.sched_getaffinity(0))
MANY = len(os.sched_getaffinity(0)) > 1


def cpu_ticks(pid: int) -> int:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(words[11]) + int(words[12])


def test_each_kind_burns_the_given_cpu_and_ends_with_the_block() -> None:
    with Interference([CPU], 60.0, maker="own") as interference:
        pids = interference.pids
        assert len(pids) == len(KINDS)
        assert "own burners" in interference.description
        for pid in pids:
            assert os.sched_getaffinity(pid) == {CPU}
        wait_until(
            lambda: all(cpu_ticks(pid) > 0 for pid in pids), 20.0, "each burner uses its CPU"
        )
        assert interference.is_running()
    assert not any(is_alive(pid) for pid in pids)


def test_burners_end_by_themselves_when_their_time_is_up() -> None:
    with Interference([CPU], 0.3, maker="own", kinds=("cpu", "switch")) as interference:
        wait_until(lambda: not interference.is_running(), 10.0, "a burner ends by itself")


def test_burners_die_with_their_parent() -> None:
    program = (
        "import sys, time\n"
        "from emulation.interference import Interference\n"
        f"with Interference([{CPU}], 60.0, maker='own', kinds=('cpu', 'memory')) as made:\n"
        "    print(*made.pids, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), 10.0, "the burners die")


@pytest.mark.skipif(shutil.which("stress-ng") is None, reason="stress-ng is not installed")
def test_stress_ng_is_taken_where_it_is_installed_and_leaves_no_child() -> None:
    with Interference([CPU], 60.0) as interference:
        assert interference.maker == "stress-ng"
        (pid,) = interference.pids

        def children() -> list[int]:
            return [
                int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            ]

        wait_until(lambda: len(children()) >= len(KINDS), 20.0, "it forks")
        found = children()
    wait_until(lambda: not any(is_alive(child) for child in found), 10.0, "its children end")


def test_nonsense_is_refused_in_one_sentence() -> None:
    for bad in (
        lambda: Interference([CPU], 1.0, kinds=("magic",)),
        lambda: Interference([4095], 1.0),
        lambda: Interference([], 1.0),
        lambda: Interference([CPU], -1.0),
        lambda: choose_maker("magic"),
    ):
        with pytest.raises(InterferenceError):
            bad()


@pytest.mark.parametrize("num_cpus", [2, 3, 4, 8, 16])
def test_nobody_shares_the_hosts_cpus(num_cpus: int) -> None:
    split = CpuSplit.of(range(num_cpus))
    assert not split.host & (split.device | split.smartnic | split.client)
    assert split.host | split.device | split.smartnic | split.client <= set(range(num_cpus))
    assert split.is_shared == (num_cpus == 2)
    assert all(split.to_dict().values())


def test_one_cpu_cannot_be_split() -> None:
    with pytest.raises(UserError, match="at least 2 CPUs"):
        CpuSplit.of([0])


def test_cpu_sets_are_written_as_the_kernel_does() -> None:
    assert cpu_text([0, 1, 2, 6]) == "0-2,6"
    assert cpu_text([3]) == "3"


@pytest.fixture
def idle_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.mark.skipif(not MANY, reason="one CPU cannot be split")
@pytest.mark.parametrize("name", MEASURES)
def test_a_counter_measure_acts_or_says_why_not(
    name: str, idle_process: subprocess.Popen[bytes]
) -> None:
    pid = idle_process.pid
    split = CpuSplit.of(os.sched_getaffinity(0))
    with measure_applied(name, pid, split) as tried:
        assert tried.name == name
        assert len(tried.how) > 10
        if name == "realtime":
            assert (os.sched_getscheduler(pid) == os.SCHED_FIFO) == tried.is_available
        if name == "pinning":
            assert tried.is_available == (len(split.host) > 1)
    assert os.sched_getscheduler(pid) == os.SCHED_OTHER


def test_time_of_burners_is_bounded_from_outside_too() -> None:
    began = time.monotonic()
    with Interference([CPU], 60.0, maker="own", kinds=("cpu",)):
        pass
    assert time.monotonic() - began < 15.0
