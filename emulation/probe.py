"""What this host can do, found out by doing it: every check tries the thing itself.

A check gives what was seen, or why it does not work and how to put it right. `choose_link` turns
the answers into the best way from the SmartNIC to the ring.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from emulation.rxe import MODULE, run_command
from emulation.vm.accelerator import KVM, kvm_boots
from emulation.vm.image import build_image
from emulation.vm.machine import QEMU
from engine import native
from engine.errors import UserError
from engine.link import LinkError
from engine.link.verbs_config import VerbsConfig
from engine.link.verbs_device import VerbsDevice, device_names
from engine.link.verbs_gid import choose_gid, read_gid_table
from engine.link.verbs_selftest import loopback

LOCK_BYTES = 32 << 20  # a window of many ports
DMA_BUF_BYTES, DMA_BUF_FD = 2 << 20, 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
UVERBS = Path("/dev/infiniband")
SHARED_MEMORY = Path("/dev/shm")
COMMAND_TIMEOUT_S = 20.0
RXE, VM, SHM = "rxe", "vm", "shm"
LINKS = (RXE, VM, SHM)


class Missing(Exception):  # noqa: N818 - a finding, not a mistake
    """A capability that is not there: what was seen, and the fix."""

    def __init__(self, detail: str, fix: str) -> None:
        super().__init__(detail)
        self.detail, self.fix = detail, fix


@dataclass(frozen=True, slots=True)
class Check:
    """One capability: how it is tried, and which links cannot do without it."""

    name: str
    attempt: Callable[[], str]
    """Returns what was seen; raises Missing, UserError or LinkError."""
    links: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of a check."""

    name: str
    works: bool
    detail: str
    fix: str
    links: tuple[str, ...]


def perform(check: Check) -> Finding:
    """Try one capability; never raises for a capability that is missing."""
    try:
        return Finding(check.name, True, check.attempt(), "", check.links)
    except Missing as missing:
        return Finding(check.name, False, missing.detail, missing.fix, check.links)
    except (UserError, LinkError, OSError, subprocess.SubprocessError) as error:
        detail, _, fix = str(error).partition("; ")
        return Finding(check.name, False, detail, fix or "see the message", check.links)


def rdma_module() -> str:
    """The kernel's Soft-RoCE."""
    if not (Path("/sys/module") / MODULE).exists():
        try:
            run_command(["modprobe", MODULE])
        except UserError as error:
            raise Missing(
                f"{MODULE} cannot be loaded into kernel {_kernel()}: {error}",
                "use --link vm (emulated machines), or a kernel with it: Debian "
                "linux-image-amd64, Ubuntu linux-modules-extra-$(uname -r)",
            ) from error
    return f"{MODULE} is loaded"


def _kernel() -> str:
    return Path("/proc/sys/kernel/osrelease").read_text().strip()


def rdma_tool() -> str:
    """The tool that makes links."""
    if shutil.which("rdma") is None:
        raise Missing("no rdma command", "apt-get install iproute2")
    try:
        links = json.loads(run_command(["rdma", "-j", "link", "show"]) or "[]")
    except UserError as error:
        raise Missing(str(error), "load the kernel's RDMA core (modprobe ib_core)") from error
    names = [one["ifname"] for one in links if "ifname" in one]
    return f"links: {', '.join(names) or 'none yet'}"


def uverbs() -> str:
    """The device node that user programs open."""
    paths = sorted(UVERBS.glob("uverbs*"))
    if not paths:
        raise Missing(
            f"no {UVERBS}/uverbs*",
            "make a link (rdma link add rxe0 type rxe netdev INTERFACE); in a container give "
            "--device /dev/infiniband",
        )
    with paths[0].open("r+b", buffering=0):
        return f"{paths[0]} opens"


def memlock() -> str:
    """As much locked memory as a window needs."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, LOCK_BYTES) as memory:
        anchor = ctypes.c_char.from_buffer(memory)
        address = ctypes.c_void_p(ctypes.addressof(anchor))
        locked = libc.mlock(address, ctypes.c_size_t(LOCK_BYTES)) == 0
        if locked:
            libc.munlock(address, ctypes.c_size_t(LOCK_BYTES))
        del anchor
    if not locked:
        raise Missing(
            f"{LOCK_BYTES >> 10} KiB cannot be locked, the limit is {text}",
            "ulimit -l unlimited; in compose.yaml: 'ulimits: {memlock: -1}'",
        )
    return f"{LOCK_BYTES >> 10} KiB locked (limit: {text})"


def _first_device() -> str:
    names = device_names()
    if not names:
        raise Missing("no RDMA device", "make one: rdma link add rxe0 type rxe netdev INTERFACE")
    return names[0]


def gid() -> str:
    """A GID that reaches other hosts."""
    device = _first_device()
    entry = choose_gid(device, read_gid_table(device, 1))
    return f"{device} index {entry.index}: {entry.address} ({entry.kind}, {entry.netdev})"


def mtu() -> str:
    """The MTU of the RDMA port."""
    _first_device()
    with VerbsDevice(VerbsConfig()) as device:
        if device.mtu_bytes < 1024:
            raise Missing(
                f"{device.name} has an MTU of {device.mtu_bytes}",
                f"ip link set {device.gid.netdev} mtu 1500 (better 4200)",
            )
        return f"{device.name}: {device.mtu_bytes} bytes"


def write() -> str:
    """A real RDMA WRITE on the host's own device."""
    _first_device()
    return loopback(VerbsConfig())


def qemu() -> str:
    """QEMU with what the two machines need."""
    if shutil.which(QEMU) is None:
        raise Missing(f"no {QEMU}", "apt-get install qemu-system-x86")
    version = run_command([QEMU, "--version"]).splitlines()[0]
    if "dgram" not in run_command([QEMU, "-netdev", "help"]):
        raise Missing(f"{version} has no -netdev dgram", "install QEMU 7.2 or later")
    return version


def kvm() -> str:
    """Whether a guest boots under KVM; without it the machines are emulated in software."""
    qemu()
    if not KVM.exists():
        raise Missing(f"no {KVM}", "none needed: software emulation works, only slower")
    if not kvm_boots(build_image()):
        raise Missing(
            f"{KVM} is there, but no guest boots under it",
            "none needed: software emulation works, only slower",
        )
    return "a guest boots"


def machines() -> str:
    """Two machines, and a real RDMA WRITE from one into the other's window."""
    qemu()
    from emulation.vm.trial import write_between_machines

    return write_between_machines()


def shared_memory() -> str:
    """Memory that processes share by name."""
    with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
        file.truncate(LOCK_BYTES)
        with mmap.mmap(file.fileno(), LOCK_BYTES) as memory:
            memory[:4] = b"ring"
    free = shutil.disk_usage(SHARED_MEMORY).free
    return f"{SHARED_MEMORY} is writable, {free >> 20} MiB free"


def compiler() -> str:
    """A C++17 compiler that makes loadable libraries."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text('extern "C" int answer() { return 42; }\n')
        try:
            library = native.build_library([source], name="probe")
        except native.CompileError as error:
            raise Missing(str(error).splitlines()[0], "apt-get install g++") from error
        if ctypes.CDLL(str(library)).answer() != 42:
            raise Missing("the compiler makes wrong code", "set CXX to another compiler")
    return " ".join(native.find_compiler())


def docker() -> str:
    """A Docker engine that answers."""
    return _docker_version(
        ["docker", "version", "--format", "{{.Server.Version}}"],
        "no Docker engine answers",
        "apt-get install docker.io, and start it (systemctl start docker, or dockerd)",
    )


def compose() -> str:
    """Compose v2."""
    return _docker_version(
        ["docker", "compose", "version", "--short"],
        "no Compose v2",
        "install the Compose plugin (Debian 13: apt-get install docker-compose)",
    )


def _docker_version(command: Sequence[str], what: str, fix: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{what}: {error}", fix) from error
    if done.returncode != 0 or not done.stdout.strip():
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise Missing(f"{what}: {reason}", fix)
    return done.stdout.strip()


def gpu() -> str:
    """A CUDA GPU, by asking the driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise Missing("no CUDA driver (libcuda.so.1)", "none needed: --device sim") from None
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or not count:
        raise Missing("the CUDA driver finds no GPU", "none needed: --device sim")
    name = ctypes.create_string_buffer(100)
    driver.cuDeviceGetName(name, 100, 0)
    return f"{count.value} x {name.value.decode()}"


def dma_buf() -> str:
    """GPU memory exported as a dma-buf, which an RNIC could register; by exporting some."""
    name = gpu()
    driver = ctypes.CDLL("libcuda.so.1")
    context, memory, fd = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_int(-1)
    retained = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    if retained or driver.cuCtxSetCurrent(context):
        raise Missing(f"no CUDA context on {name} (error {retained})", "see the driver's messages")
    try:
        if error := driver.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(DMA_BUF_BYTES)):
            raise Missing(f"no memory on {name} (error {error})", "end what uses the GPU")
        try:
            error = driver.cuMemGetHandleForAddressRange(
                ctypes.byref(fd), memory, ctypes.c_size_t(DMA_BUF_BYTES), DMA_BUF_FD, 0
            )
            if error:
                raise Missing(
                    f"{name} does not export memory as a dma-buf (CUDA error {error})",
                    "the open NVIDIA kernel modules and Linux 5.12; none needed for emulated links",
                )
            os.close(fd.value)
        finally:
            driver.cuMemFree_v2(memory)
    finally:
        driver.cuDevicePrimaryCtxRelease(0)
    return "exported and given back; an RNIC that registers it is not emulated here"


HOST_RDMA = (
    Check("rdma_rxe module", rdma_module, (RXE,)),
    Check("rdma tool", rdma_tool, (RXE,)),
    Check("uverbs device", uverbs, (RXE,)),
    Check("memlock", memlock, (RXE,)),
    Check("GID", gid, (RXE,)),
    Check("MTU", mtu, (RXE,)),
    Check("RDMA WRITE", write, (RXE,)),
)
EMULATED = (
    Check("QEMU", qemu, (VM,)),
    Check("KVM boots", kvm),
    Check("RDMA WRITE between emulated machines", machines, (VM,)),
)
OTHERS = (
    Check("shared memory", shared_memory, LINKS),
    Check("C++ compiler", compiler, LINKS),
    Check("Docker", docker),
    Check("Compose", compose),
    Check("GPU", gpu),
    Check("GPU memory as dma-buf", dma_buf),
)


@dataclass(frozen=True, slots=True)
class LinkChoice:
    """A link, and why this one."""

    link: str
    reason: str


def links_that_work(findings: Sequence[Finding]) -> list[str]:
    """Those of `LINKS` for which nothing is missing, best first."""
    missing = {link for one in findings if not one.works for link in one.links}
    return [link for link in LINKS if link not in missing]


def choose_link(wanted: str) -> LinkChoice:
    """The link for `--link`: as asked, or for "auto" the best that this host can do.

    Tries only what the answer depends on. Raises UserError when the asked-for link cannot work, or
    none can.
    """
    if wanted == SHM:
        return LinkChoice(SHM, "asked for")
    tried: list[Finding] = []
    for link, checks in ((RXE, HOST_RDMA), (VM, EMULATED[:1])):
        if wanted not in ("auto", link):
            continue
        failed = next((one for one in map(perform, checks) if not one.works), None)
        if failed is None:
            reason = "asked for" if wanted == link else _why(tried, link)
            return LinkChoice(link, reason)
        tried.append(failed)
        if wanted == link:
            raise UserError(
                f"--link {link} cannot work here: {failed.name}: {failed.detail}; {failed.fix}"
            )
    if wanted != "auto":
        raise UserError(f"--link {wanted}: there is auto, {', '.join(LINKS)}")
    return LinkChoice(SHM, _why(tried, SHM))


def _why(tried: Sequence[Finding], link: str) -> str:
    if not tried:
        return "this host's kernel does RDMA"
    lacking = "; ".join(f"{one.name}: {one.detail}" for one in tried)
    return f"the best that works here ({lacking})" if link else lacking
