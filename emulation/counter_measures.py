"""What an operator may do for a host under interference, each tried on the running host process.

A measure is applied to one process and undone; ``Tried`` says whether it could be, and why not.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from emulation.cpu_split import CpuSplit, bind, cpu_text, set_realtime, threads_of

REALTIME_PRIORITY = 10
RESCTRL = Path("/sys/fs/resctrl")
SYS_PROCESS_MADVISE, MADV_COLLAPSE = 440, 25
HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Tried:
    """The outcome of a counter-measure."""

    name: str
    is_available: bool
    how: str


class Unavailable(Exception):  # noqa: N818 - reads as the fact it states
    """This machine, or this process, does not allow it; the message says why."""


@contextmanager
def _pinning(pid: int, split: CpuSplit) -> Iterator[str]:
    if len(split.host) < 2:
        raise Unavailable("the host has one CPU, so it is pinned already")
    cpu = min(split.host)
    bind(pid, {cpu})
    try:
        yield f"the host is bound to CPU {cpu} of {cpu_text(split.host)}"
    finally:
        bind(pid, split.host)


@contextmanager
def _realtime(pid: int, split: CpuSplit) -> Iterator[str]:
    try:
        set_realtime(pid, REALTIME_PRIORITY)
    except OSError as error:
        raise Unavailable(f"SCHED_FIFO is refused ({error.strerror}): needs CAP_SYS_NICE") from None
    try:
        yield f"all threads of the host run at SCHED_FIFO {REALTIME_PRIORITY}"
    finally:
        with contextlib.suppress(OSError):
            set_realtime(pid, 0)


@contextmanager
def _huge_pages(pid: int, split: CpuSplit) -> Iterator[str]:
    """Anonymous memory of the running host is collapsed into huge pages (Linux 6.1)."""
    before = _huge_kib(pid)
    library = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    number = 0
    try:
        for start, end in _anonymous(pid):
            vector = struct.pack("QQ", start, end - start)
            if library.syscall(SYS_PROCESS_MADVISE, pidfd, vector, 1, MADV_COLLAPSE, 0) < 0:
                number = ctypes.get_errno()
    finally:
        os.close(pidfd)
    gained = _huge_kib(pid) - before
    if gained <= 0 and not before:
        why = os.strerror(number) if number else "it has no 2 MiB of anonymous memory in a piece"
        raise Unavailable(f"the kernel made no huge page of the host's memory: {why}")
    yield f"{(before + gained) >> 10} MiB of the host's memory lie in huge pages"


def _huge_kib(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"AnonHugePages:\s+(\d+)", text)
    return int(found[1]) if found else 0


def _anonymous(pid: int) -> Iterator[tuple[int, int]]:
    """Whole huge pages within private anonymous mappings."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        words = line.split()
        if words[1] != "rw-p" or (len(words) > 5 and words[5] != "[heap]"):
            continue
        low, high = (int(word, 16) for word in words[0].split("-"))
        start = -(-low // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end = high // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if end > start:
            yield start, end


@contextmanager
def _cache_partition(pid: int, split: CpuSplit) -> Iterator[str]:
    """Half of the last-level cache for the host alone, by a resctrl group of its own."""
    root = RESCTRL / "schemata"
    if not root.exists():
        raise Unavailable(f"{RESCTRL} is not mounted (no Intel RDT or AMD QoS, or not allowed)")
    group = RESCTRL / f"blinkbed-{os.getpid()}"
    whole = root.read_text()
    found = re.search(r"L3:(.*)", whole)
    if found is None:
        raise Unavailable("resctrl has no L3 partitions here")
    masks = dict(part.split("=") for part in found[1].split(";"))
    width = min(int(mask, 16).bit_length() for mask in masks.values()) // 2
    half = ";".join(f"{cache}={(1 << width) - 1:x}" for cache in masks)
    rest = ";".join(f"{cache}={int(mask, 16) >> width << width:x}" for cache, mask in masks.items())
    try:
        group.mkdir()
        try:
            (group / "schemata").write_text(f"L3:{half}\n")
            root.write_text(f"L3:{rest}\n")
            for thread in threads_of(pid):
                (group / "tasks").write_text(str(thread))
            yield f"half of the last-level cache ({half}) is the host's alone"
        finally:
            root.write_text(f"{found[0]}\n")
            group.rmdir()
    except OSError as error:
        raise Unavailable(f"resctrl refuses: {error.strerror}") from None


MEASURES: dict[str, Callable[[int, CpuSplit], contextlib.AbstractContextManager[str]]] = {
    "pinning": _pinning,
    "realtime": _realtime,
    "huge-pages": _huge_pages,
    "cache-partition": _cache_partition,
}


@contextmanager
def measure_applied(name: str, pid: int, split: CpuSplit) -> Iterator[Tried]:
    """Apply a measure (``none``: nothing) for the time of the block, and say what came of it."""
    if name == "none":
        yield Tried(name, True, "no counter-measure")
        return
    with contextlib.ExitStack() as stack:
        try:
            how = stack.enter_context(MEASURES[name](pid, split))
        except (Unavailable, OSError) as error:
            tried = Tried(name, False, str(error))
        else:
            tried = Tried(name, True, how)
        yield tried
