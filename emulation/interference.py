"""Interference: pressure on the host's CPU set, as other tenants of a server would make it.

Kinds: ``cpu`` (arithmetic), ``cache`` (the last-level cache), ``memory`` (bandwidth), ``switch``
(the kernel's scheduler). stress-ng makes it where it is installed, else burners of our own
(csrc/burn.cpp); ``description`` says which. Every process is bound to the given CPUs, ends by
itself when its time is up, and dies with us.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from emulation.cpu_split import cpu_text
from engine.child import die_with
from engine.errors import UserError
from engine.native import build_library

KINDS = ("cpu", "cache", "memory", "switch")
MAKERS = ("auto", "stress-ng", "own")
STRESSORS = {"cpu": "cpu", "cache": "cache", "memory": "stream", "switch": "switch"}
SOURCE = Path(__file__).parent / "csrc" / "burn.cpp"
BURNER = Path(__file__).parent / "burner.py"
MEMORY_BYTES = 128 << 20
DEFAULT_CACHE_BYTES, MOST_CACHE_BYTES = 32 << 20, 128 << 20
MOST_SECONDS = 3600.0
STOP_TIMEOUT_S = 5.0


class InterferenceError(UserError):
    """The pressure could not be made."""


class Interference:
    """Burners on some CPUs; a context manager after which none is left.

    cpus: the host's CPU set. seconds: after which every burner ends by itself, whatever happens
    to us. kinds: one burner of each on each CPU, `per_cpu` times. maker: ``auto`` takes stress-ng
    where it is installed. Raises InterferenceError.
    """

    def __init__(
        self,
        cpus: Collection[int],
        seconds: float,
        *,
        kinds: Sequence[str] = KINDS,
        per_cpu: int = 1,
        maker: str = "auto",
    ) -> None:
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise InterferenceError(f"no kind of interference {unknown[0]!r}: {', '.join(KINDS)}")
        if not cpus or not set(cpus) <= os.sched_getaffinity(0):
            raise InterferenceError(f"interference on CPUs {sorted(cpus)}: not all are ours to use")
        if not 0 < seconds <= MOST_SECONDS:
            raise InterferenceError(f"interference for {seconds:g} s: between 0 and {MOST_SECONDS}")
        self._cpus, self._seconds = sorted(cpus), seconds
        self._kinds, self._count = tuple(kinds), per_cpu * len(cpus)
        self.maker = choose_maker(maker)
        self._processes: list[subprocess.Popen[str]] = []

    @property
    def description(self) -> str:
        """What presses on what, and what makes the pressure."""
        makers = {"own": "Blinkbed's own burners", "stress-ng": "stress-ng"}
        parts = ", ".join(f"{self._count} x {kind}" for kind in self._kinds)
        return f"{makers[self.maker]} on CPU {cpu_text(self._cpus)}: {parts}"

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that we started (stress-ng has children of its own)."""
        return [process.pid for process in self._processes]

    def __enter__(self) -> Self:
        try:
            if self.maker == "stress-ng":
                self._start(self._stress_ng(), subprocess.DEVNULL)
            else:
                self._start_burners()
        except BaseException:
            self.close()
            raise
        return self

    def _stress_ng(self) -> list[str]:
        words = [shutil.which("stress-ng") or "stress-ng", "--quiet"]
        for kind in self._kinds:
            words += [f"--{STRESSORS[kind]}", str(self._count)]
        return [*words, "--timeout", f"{max(1, round(self._seconds))}s"]

    def _start_burners(self) -> None:
        library = str(build_library([SOURCE], name="burn"))
        for kind in self._kinds:
            num_bytes = cache_bytes() if kind == "cache" else MEMORY_BYTES
            words = [library, f"burn_{kind}", str(self._seconds), str(num_bytes)]
            for _ in range(self._count):
                self._start([sys.executable, "-I", "-S", str(BURNER), *words], subprocess.PIPE)
        for process in self._processes:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "burning":
                raise InterferenceError(f"a burner ended with status {process.wait()}")

    def _start(self, words: Sequence[str], output: int) -> None:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            text=True,
            process_group=0,
            preexec_fn=_bound_to(self._cpus, die_with(os.getpid())),
        )
        self._processes.append(process)

    def is_running(self) -> bool:
        """Whether no burner has ended."""
        return all(process.poll() is None for process in self._processes)

    def close(self) -> None:
        """End all burners at once; idempotent."""
        for process in self._processes:
            # The group, since stress-ng forks; our own child not yet reaped keeps the id ours.
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait(STOP_TIMEOUT_S)
            if process.stdout is not None:
                process.stdout.close()
        self._processes.clear()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _bound_to(cpus: Collection[int], then: Callable[[], None]) -> Callable[[], None]:
    def bind() -> None:
        os.sched_setaffinity(0, cpus)
        # The burners are ordinary tenants, even where we run at another priority.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        then()

    return bind


def choose_maker(maker: str) -> str:
    """``stress-ng`` or ``own``; raises InterferenceError for what is not there."""
    if maker not in MAKERS:
        raise InterferenceError(f"no maker of interference {maker!r}: {', '.join(MAKERS)}")
    is_there = shutil.which("stress-ng") is not None
    if maker == "stress-ng" and not is_there:
        raise InterferenceError("stress-ng is not installed (Debian: apt-get install stress-ng)")
    return "stress-ng" if is_there and maker != "own" else "own"


def cache_bytes() -> int:
    """Size of the last-level cache, as the kernel tells it, within bounds."""
    sizes = [DEFAULT_CACHE_BYTES]
    found = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    for path in found:
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
    return min(max(sizes[1:] or sizes), MOST_CACHE_BYTES)
