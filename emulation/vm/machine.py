"""One emulated machine: a QEMU process with a kernel and an initramfs, no disk.

Its console goes to a log, its agent and QEMU's control socket are Unix sockets in its folder. It
ends with the process that started it (PR_SET_PDEATHSIG), whatever happens to that one.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from emulation.vm.agent_client import AgentClient, AgentError, GuestProcess
from emulation.vm.image import Image
from emulation.vm.qmp import QmpClient
from engine import native
from engine.errors import UserError

CSRC = Path(__file__).parent / "csrc"
QEMU = "qemu-system-x86_64"
BOOT_TIMEOUT_S = 60.0
CPU = "max,-erms"
"""Without erms: with it the guest's memcpy is "rep movsb", which software emulation does a byte at
a time, and the host would see RDMA-written words half done."""
WINDOW_STEP_BYTES = 16 << 20
WINDOW_MIN_BYTES = 32 << 20
HOST_MTU = 9000
NIC_OPTIONS = "romfile=,ioeventfd=off"
"""Without ioeventfd a doorbell is served by the thread that rang it, not by waking another: under
software emulation posting a work request takes 180 us instead of 500.
"""
PR_SET_PDEATHSIG = 1  # prctl(2)
_prctl = ctypes.CDLL(None, use_errno=True).prctl


@dataclass(frozen=True, slots=True)
class Window:
    """The RNIC machine's nvdimm: a file of the host."""

    path: Path
    num_bytes: int

    def __post_init__(self) -> None:
        if self.num_bytes < WINDOW_MIN_BYTES or self.num_bytes % WINDOW_STEP_BYTES:
            raise UserError(
                f"the window's file must have a multiple of 16 MiB, at least 32 MiB, "
                f"not {self.num_bytes} bytes"
            )


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """What one machine is made of.

    cable: the -netdev arguments that join it to its peer (without the id).
    forwards: (host address, host port, guest port), TCP.
    """

    role: str
    address: str
    mac: str
    cable: str
    accelerator: str = "tcg"
    num_cpus: int = 1
    memory_mib: int = 1024
    mtu: int = 4200
    window: Window | None = None
    forwards: tuple[tuple[str, int, int], ...] = ()
    extra: tuple[str, ...] = field(default=())


def accelerator_arguments(accelerator: str) -> list[str]:
    """QEMU's -accel and -cpu for "kvm" or "tcg"."""
    if accelerator == "kvm":
        return ["-accel", "kvm", "-cpu", "host,-erms"]
    return ["-accel", "tcg,thread=multi", "-cpu", CPU]


def qemu_command(config: MachineConfig, image: Image, folder: Path) -> list[str]:
    """The whole command line. Sockets and the console's log are in `folder`."""
    is_rnic = config.window is not None
    memory = f"{config.memory_mib}"
    if config.window is not None:
        window_mib = config.window.num_bytes >> 20
        memory += f",slots=2,maxmem={config.memory_mib + window_mib + 1024}M"
    command = [QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    command += ["-machine", "q35,nvdimm=on" if is_rnic else "q35"]
    command += accelerator_arguments(config.accelerator)
    command += ["-smp", str(config.num_cpus), "-m", memory]
    command += ["-kernel", str(image.kernel), "-initrd", str(image.initramfs)]
    command += ["-drive", f"file={image.packages},if=virtio,format=raw,readonly=on"]
    command += ["-append", kernel_arguments(config)]
    command += ["-serial", f"file:{folder / 'console.log'}"]
    command += ["-chardev", f"socket,id=agent,path={folder / 'agent.sock'},server=on,wait=off"]
    command += ["-device", "virtio-serial-pci", "-device", "virtserialport,chardev=agent"]
    command += ["-chardev", f"socket,id=qmp,path={folder / 'qmp.sock'},server=on,wait=off"]
    command += ["-mon", "chardev=qmp,mode=control"]
    command += ["-netdev", f"dgram,id=cable,{config.cable}"]
    device = f"virtio-net-pci,netdev=cable,mac={config.mac},host_mtu={HOST_MTU},{NIC_OPTIONS}"
    command += ["-device", device]
    if config.forwards:
        command += ["-netdev", f"user,id=way-in,{_forwards(config)}"]
        command += ["-device", f"virtio-net-pci,netdev=way-in,{NIC_OPTIONS}"]
    if config.window is not None:
        path, size = config.window.path, config.window.num_bytes
        backend = f"memory-backend-file,id=window,share=on,mem-path={path},size={size}"
        command += ["-object", backend, "-device", "nvdimm,id=nv1,memdev=window,unarmed=off"]
    return [*command, *config.extra]


def _forwards(config: MachineConfig) -> str:
    return ",".join(
        f"hostfwd=tcp:{host}:{port}-:{guest_port}" for host, port, guest_port in config.forwards
    )


def kernel_arguments(config: MachineConfig) -> str:
    """For init and the kernel; mitigations protect nobody in here and cost time.

    noautogroup: with it a program that looks at a completion queue yields to the kernel thread
    that must fill it; in a group of its own it would keep the processor until the next tick.
    """
    return (
        "console=ttyS0 quiet panic=-1 net.ifnames=0 mitigations=off random.trust_cpu=on "
        "noautogroup "
        f"bb.role={config.role} bb.address={config.address} bb.mtu={config.mtu}"
    )


def environment(config: MachineConfig) -> dict[str, str] | None:
    """QEMU's: with a longer backlog for its forwarded ports (csrc/listen_backlog.cpp)."""
    if not config.forwards:
        return None
    return {**os.environ, "LD_PRELOAD": str(backlog_library())}


def backlog_library() -> Path:
    """Built at first use."""
    return native.build_library([CSRC / "listen_backlog.cpp"], name="listen-backlog")


def _die_with(parent_pid: int) -> Callable[[], None]:
    """What runs between fork and exec: the kernel is asked for SIGKILL when the parent dies."""

    def ask() -> None:
        if _prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0 or (
            os.getppid() != parent_pid
        ):
            os._exit(126)

    return ask


class Machine:
    """A running machine. A context manager; `close` is idempotent.

    Start it in a thread that lives as long as it should: the kernel counts the thread as parent.
    """

    def __init__(self, config: MachineConfig, image: Image, folder: Path) -> None:
        if shutil.which(QEMU) is None:
            raise UserError(
                f"{QEMU} is missing; install it (Debian: apt-get install qemu-system-x86)"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.config = config
        self.folder = folder
        self.started_at = time.monotonic()
        self._agent: AgentClient | None = None
        self._qmp: QmpClient | None = None
        with (folder / "qemu.log").open("wb") as log:
            self.process = subprocess.Popen(
                qemu_command(config, image, folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(config),
                process_group=0,
                preexec_fn=_die_with(os.getpid()),
            )
        self.pid = self.process.pid

    def wait_ready(self, timeout_s: float = BOOT_TIMEOUT_S) -> dict[str, Any]:
        """Wait for the agent; what the guest says of itself (AgentClient.facts).

        Raises UserError, with the end of the console, when the machine ends or is not ready.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            if self.process.poll() is not None or left <= 0:
                raise UserError(f"the emulated machine {self.config.role} {self._why(timeout_s)}")
            try:
                if self._agent is None:
                    self._agent = AgentClient(self.folder / "agent.sock", timeout_s=left)
                # The first answer comes when the guest's agent runs; what is sent before is kept.
                return self._agent.facts(timeout_s=left)
            except (OSError, AgentError):
                time.sleep(0.05)

    def _why(self, timeout_s: float) -> str:
        if self.process.poll() is not None:
            how = f"ended with status {self.process.returncode}"
        else:
            how = f"was not ready within {timeout_s:g} s"
        return f"{how}: {self.log_tail()} (logs in {self.folder})"

    def log_tail(self) -> str:
        """The last lines of QEMU's and the console's logs."""
        lines: list[str] = []
        for name in ("qemu.log", "console.log"):
            path = self.folder / name
            if path.exists():
                lines += path.read_text(errors="replace").strip().splitlines()[-5:]
        return " | ".join(lines)

    @property
    def agent(self) -> AgentClient:
        """The guest's agent; the machine must be ready."""
        if self._agent is None:
            raise AgentError(f"the machine {self.config.role} is not ready")
        return self._agent

    @property
    def qmp(self) -> QmpClient:
        """QEMU's control connection."""
        if self._qmp is None:
            self._qmp = QmpClient(self.folder / "qmp.sock")
        return self._qmp

    def start(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> GuestProcess:
        """Start a program in the guest."""
        return self.agent.start(argv, env=env)

    def run(self, argv: Sequence[str], *, timeout_s: float = 60.0) -> str:
        """Run a program in the guest to its end; its output. Raises AgentError on failure."""
        return self.agent.run(argv, timeout_s=timeout_s)

    def cpu_s(self) -> float:
        """Processor time that the machine has used, seconds."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def set_cable(self, plugged: bool) -> None:
        """Pull the cable to the peer, or plug it in: the guest sees the carrier."""
        self.qmp.execute("set_link", name="cable", up=plugged)

    def pause(self) -> None:
        """Freeze the machine as a whole (SIGSTOP)."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Take its power away and reap it."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End the machine and let go of it."""
        if self.process.poll() is None:
            self.kill()
        for client in (self._agent, self._qmp):
            if client is not None:
                client.close()
        self._agent = self._qmp = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
