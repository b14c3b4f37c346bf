"""Which role runs on which CPUs, so that interference meets the host alone.

On real hardware the GPU and the SmartNIC have processors of their own. Here they share the
machine's CPUs with the host, so the split gives the host (and what presses on it) a CPU set that
nobody else of the stack uses. With two CPUs the rest is one CPU, which device, SmartNIC and
client share with real-time priorities, so that what interference drives off the host's CPUs does
not press on those that real hardware keeps apart.

One CPU cannot serve both as real hardware would, so the order of priorities is a choice that the
results record. `device_first`: a paced device sleeps through its steps, and SmartNIC and client
work then; a first token waits for a device that looks at its doorbells. Device last: the device
waits for SmartNIC and client after each step, which a host-driven path pays for in every copy and
wake-up, and which looks like the host's cost in the device's own clock. A device that computes
(a real model on the CPU) would starve the SmartNIC, so it comes last.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import UserError
from engine.ready import ReadyLine

CLIENT_PRIORITY, SMARTNIC_PRIORITY, DEVICE_PRIORITY, DEVICE_FIRST_PRIORITY = 16, 15, 10, 20


def cpu_text(cpus: Collection[int]) -> str:
    """``0-3,6`` for people."""
    ordered, parts = sorted(cpus), []
    start = previous = -2
    for cpu in [*ordered, -2]:
        if cpu != previous + 1:
            if start >= 0:
                parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = cpu
        previous = cpu
    return ",".join(parts)


@dataclass(frozen=True, slots=True)
class CpuSplit:
    """CPU sets by role; `host` is disjoint from all others."""

    host: frozenset[int]
    device: frozenset[int]
    smartnic: frozenset[int]
    client: frozenset[int]

    @classmethod
    def of(cls, cpus: Collection[int]) -> CpuSplit:
        """Divide: one CPU each for device, SmartNIC and client while the host keeps half.

        Raises UserError with fewer than two.
        """
        ordered = sorted(cpus)
        if len(ordered) < 2:
            raise UserError(
                "comparing needs at least 2 CPUs: one for the host, one for device and SmartNIC"
            )
        num_host = max(1, len(ordered) // 2)
        host, rest = ordered[:num_host], ordered[num_host:]
        device, nic = rest[0], rest[min(1, len(rest) - 1)]
        client = rest[2:] or [nic]
        return cls(frozenset(host), frozenset([device]), frozenset([nic]), frozenset(client))

    @property
    def is_shared(self) -> bool:
        """Whether the device has no CPU of its own."""
        return bool(self.device & (self.smartnic | self.client))

    @property
    def description(self) -> str:
        """One sentence."""
        text = (
            f"host and interference on CPU {cpu_text(self.host)}, device on "
            f"{cpu_text(self.device)}, SmartNIC on {cpu_text(self.smartnic)}, client on "
            f"{cpu_text(self.client)}"
        )
        if self.is_shared:
            text += "; device, SmartNIC and client share a CPU for want of more"
        return text

    def to_dict(self) -> dict[str, str]:
        """For reports."""
        roles: Mapping[str, frozenset[int]] = {
            "host": self.host,
            "device": self.device,
            "smartnic": self.smartnic,
            "client": self.client,
        }
        return {role: cpu_text(cpus) for role, cpus in roles.items()}

    def apply(self, ready: ReadyLine, *, device_first: bool = False) -> str:
        """Bind the stack's processes, and set their priorities, which are returned in words."""
        device_priority = DEVICE_FIRST_PRIORITY if device_first else DEVICE_PRIORITY
        for pid, cpus in (
            (ready.launcher_pid, self.host),
            (ready.host_pid, self.host),
            (ready.device_pid, self.device),
            (ready.smartnic_pid, self.smartnic),
        ):
            bind(pid, cpus)
        priorities = {ready.smartnic_pid: SMARTNIC_PRIORITY}
        if ready.device_pid != ready.host_pid:  # else the GPU is real
            priorities[ready.device_pid] = device_priority
        try:
            for pid, priority in priorities.items():
                set_realtime(pid, priority)
        except OSError as error:
            return f"without real-time priorities ({error.strerror}): other programs may disturb"
        return (
            f"device, SmartNIC and client at SCHED_FIFO {device_priority}, {SMARTNIC_PRIORITY}, "
            f"{CLIENT_PRIORITY}"
        )


def threads_of(pid: int) -> Iterator[int]:
    """Thread ids of a process."""
    for path in Path(f"/proc/{pid}/task").iterdir():
        yield int(path.name)


def bind(pid: int, cpus: Collection[int]) -> None:
    """All threads of a process; those that it starts later inherit it."""
    for thread in threads_of(pid):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, cpus)


def set_realtime(pid: int, priority: int) -> None:
    """SCHED_FIFO for all threads of a process; priority 0 is SCHED_OTHER. Raises OSError."""
    policy = os.SCHED_FIFO if priority else os.SCHED_OTHER
    for thread in threads_of(pid):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(thread, policy, os.sched_param(priority))
