"""Two emulated machines joined by a cable: the SmartNIC, and the GPU's RNIC with the window."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from emulation.faults import Netem, clear_command
from emulation.vm.accelerator import usable_accelerator
from emulation.vm.agent_client import GuestProcess
from emulation.vm.image import build_image
from emulation.vm.machine import (
    WINDOW_MIN_BYTES,
    WINDOW_STEP_BYTES,
    Machine,
    MachineConfig,
    Window,
)
from engine.errors import UserError

RNIC, SMARTNIC = "rnic", "smartnic"
RNIC_ADDRESS, SMARTNIC_ADDRESS = "10.9.0.1", "10.9.0.2"
PREFIX_LENGTH = 24
CABLE_INTERFACE = "eth0"
MACS = {RNIC: "52:54:00:00:00:01", SMARTNIC: "52:54:00:00:00:02"}
NAMESPACE_BYTES = 4 << 20  # the nvdimm's own data, ahead of what the guest can map
NAME = "blinkbed-vm-"  # then the owner's process id
MEMORY_FOLDERS = (Path("/dev/shm"), Path("/run"), Path("/tmp"))


@dataclass(frozen=True, slots=True)
class PairConfig:
    """Sizes of the two machines.

    window_bytes: what must be usable of the window, rounded up.
    accelerator: "tcg", "kvm", or "auto": KVM where a guest really boots under it.
    forwards: TCP ports of the SmartNIC machine, (host address, host port, guest port).
    """

    window_bytes: int = WINDOW_MIN_BYTES - NAMESPACE_BYTES
    accelerator: str = "auto"
    smartnic_cpus: int = 1
    smartnic_memory_mib: int = 1024
    rnic_memory_mib: int = 768
    mtu: int = 4200
    forwards: tuple[tuple[str, int, int], ...] = ()


def window_file_bytes(window_bytes: int) -> int:
    """Size of the window's file so that `window_bytes` are usable."""
    steps = -(-(window_bytes + NAMESPACE_BYTES) // WINDOW_STEP_BYTES)
    return max(steps * WINDOW_STEP_BYTES, WINDOW_MIN_BYTES)


def make_window_file(window_bytes: int, owner_pid: int) -> Path:
    """A new file for the window, in memory; `sweep` removes it once the owner is gone."""
    size = window_file_bytes(window_bytes)
    for folder in MEMORY_FOLDERS:
        if folder.is_dir() and shutil.disk_usage(folder).free > size:
            break
    else:
        raise UserError(f"no room for a window of {size >> 20} MiB in {MEMORY_FOLDERS[0]}")
    handle, name = tempfile.mkstemp(prefix=f"{NAME}{owner_pid}-", suffix=".window", dir=folder)
    try:
        os.ftruncate(handle, size)
    finally:
        os.close(handle)
    return Path(name)


def sweep() -> None:
    """Remove what pairs left behind whose process was killed; their machines died with it."""
    for parent in {Path(tempfile.gettempdir()), *MEMORY_FOLDERS}:
        for path in parent.glob(f"{NAME}*"):
            pid = path.name.removeprefix(NAME).split("-")[0]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


class EmulatedPair:
    """Both machines, ready for RDMA once entered. A context manager that leaves nothing behind.

    window_path, window_offset, window_bytes: where the memory that the RNIC machine may register
    lies in a file of the host.
    """

    def __init__(
        self, config: PairConfig | None = None, *, keep_logs_in: Path | None = None
    ) -> None:
        self.config = config or PairConfig()
        self._keep_logs_in = keep_logs_in
        self.accelerator = ""
        self.machines: dict[str, Machine] = {}
        self.window_offset = 0
        self.window_bytes = 0
        self.ready_after_s = 0.0
        """Time from the start of both machines until RDMA is ready in both."""
        self.ready_cpu_s: dict[str, float] = {}
        """Processor time that each machine took for it."""

    def __enter__(self) -> Self:
        image = build_image()
        self.accelerator = usable_accelerator(self.config.accelerator, image)
        sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{NAME}{os.getpid()}-"))
        self.window_path = make_window_file(self.config.window_bytes, os.getpid())
        self._image = image
        try:
            started = time.monotonic()
            for role in (RNIC, SMARTNIC):
                self._start(role)
            for role in (SMARTNIC, RNIC):
                self._wait_ready(role)
            self.ready_after_s = time.monotonic() - started
            self.ready_cpu_s = {role: one.cpu_s() for role, one in self.machines.items()}
        except BaseException:
            self.close()
            raise
        return self

    def _machine_config(self, role: str) -> MachineConfig:
        config = self.config
        peer = SMARTNIC if role == RNIC else RNIC
        cable = (
            f"local.type=unix,local.path={self.folder / role}.cable,"
            f"remote.type=unix,remote.path={self.folder / peer}.cable"
        )
        is_rnic = role == RNIC
        address = RNIC_ADDRESS if is_rnic else SMARTNIC_ADDRESS
        window = Window(self.window_path, self.window_path.stat().st_size) if is_rnic else None
        return MachineConfig(
            role=role,
            address=f"{address}/{PREFIX_LENGTH}",
            mac=MACS[role],
            cable=cable,
            accelerator=self.accelerator,
            num_cpus=1 if is_rnic else config.smartnic_cpus,
            memory_mib=config.rnic_memory_mib if is_rnic else config.smartnic_memory_mib,
            mtu=config.mtu,
            window=window,
            forwards=() if is_rnic else config.forwards,
        )

    def _start(self, role: str) -> None:
        folder = self.folder / role
        self.machines[role] = Machine(self._machine_config(role), self._image, folder)

    def _wait_ready(self, role: str) -> None:
        facts = self.machines[role].wait_ready()
        if facts.get("link_state") != "4: ACTIVE":
            machine = self.machines[role]
            raise UserError(
                f"Soft-RoCE is not up in the machine {role} ({facts}): {machine.log_tail()}"
            )
        if role == RNIC:
            if "window_offset" not in facts:
                raise UserError(f"the window is not there: {self.machines[role].log_tail()}")
            self.window_offset, self.window_bytes = facts["window_offset"], facts["window_bytes"]

    def restart(self, role: str) -> None:
        """Power a machine off, if it still runs, and on again; returns when it is ready."""
        self.machines[role].close()
        (self.folder / f"{role}.cable").unlink(missing_ok=True)
        self._start(role)
        self._wait_ready(role)

    def start(
        self, role: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> GuestProcess:
        """Start a program in one of the machines."""
        return self.machines[role].start(argv, env=env)

    def run(self, role: str, argv: Sequence[str], *, timeout_s: float = 60.0) -> str:
        """Run a program there to its end; its output. Raises AgentError on failure."""
        return self.machines[role].run(argv, timeout_s=timeout_s)

    def kill(self, role: str) -> None:
        """Take a machine's power away."""
        self.machines[role].kill()

    def pause(self, role: str) -> None:
        """Freeze a machine."""
        self.machines[role].pause()

    def resume(self, role: str) -> None:
        """Let a frozen machine go on."""
        self.machines[role].resume()

    def impair(self, fault: Netem, *roles: str) -> None:
        """Impair what the given machines send (both, if none is given)."""
        for role in roles or (RNIC, SMARTNIC):
            self.run(role, fault.command(CABLE_INTERFACE))

    def heal(self) -> None:
        """End all impairments."""
        for role in (RNIC, SMARTNIC):
            self.run(role, clear_command(CABLE_INTERFACE))

    def link_down(self) -> None:
        """Pull the cable."""
        self.machines[SMARTNIC].set_cable(plugged=False)

    def link_up(self) -> None:
        """Plug the cable in."""
        self.machines[SMARTNIC].set_cable(plugged=True)

    def close(self) -> None:
        """End both machines and remove all files; idempotent."""
        for machine in self.machines.values():
            machine.close()
        if self._keep_logs_in is not None and self.folder.exists():
            self._copy_logs(self._keep_logs_in)
        self.window_path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _copy_logs(self, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        for role in self.machines:
            for path in (self.folder / role).glob("*.log"):
                shutil.copy(path, target / f"{role}-{path.name}")

    def __exit__(self, *exc: object) -> None:
        self.close()
