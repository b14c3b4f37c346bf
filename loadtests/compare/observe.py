"""What a stack shows of itself: /metrics, and the processor time and energy of the machine."""

from __future__ import annotations

import contextlib
import importlib
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.errors import UserError

PREFIX = "blinkbed_"
TIMEOUT_S = 10.0


def scrape(url: str) -> dict[str, float]:
    """Samples of /metrics without labels, by name less its prefix and ``_total``."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as response:
        lines = response.read().decode().splitlines()
    samples = {}
    for line in lines:
        name, _, value = line.rpartition(" ")
        if name.startswith(PREFIX) and "{" not in name:
            samples[name.removeprefix(PREFIX).removesuffix("_total")] = float(value)
    return samples


def server_info(url: str) -> dict[str, Any]:
    """What the stack says of itself."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=TIMEOUT_S) as response:
        info: dict[str, Any] = json.load(response)
    return info


def wait_idle(url: str, timeout_s: float) -> None:
    """Until no request runs or waits; raises UserError after the timeout."""
    deadline = time.monotonic() + timeout_s
    while True:
        samples = scrape(url)
        if samples["num_requests_running"] + samples["num_requests_waiting"] == 0:
            return
        if time.monotonic() > deadline:
            raise UserError(f"the server had requests left after {timeout_s:g} s")
        time.sleep(0.05)


def cpu_seconds(pid: int) -> float:
    """Time on a processor of all threads that a process has now."""
    total_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread ended
            total_ns += int(path.read_text().split()[0])
    return total_ns / 1e9


class EnergyMeter:
    """Joules of the GPU since it started, by NVML; `reason` says why there are none."""

    def __init__(self, device: str) -> None:
        self._nvml: Any = None
        self.reason = "no GPU takes part"
        if device != "cuda":
            return
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByIndex(0)
            self.joules()
            self.reason = "NVML's energy counter"
        except Exception as error:
            self._nvml, self.reason = None, f"NVML has no energy counter here: {error}"

    def joules(self) -> float | None:
        """The counter, where there is one."""
        if self._nvml is None:
            return None
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3


def pace_figures(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What a paced device counted of its own lateness, as differences; empty for others."""
    return {name: after[name] - before.get(name, 0.0) for name in _pace_names(after)}


def _pace_names(samples: dict[str, float]) -> Iterator[str]:
    return (name for name in samples if "pace" in name)


def late_steps(pace: dict[str, float]) -> float:
    """Steps that took longer than the profile says, of what `pace_figures` gave."""
    return sum(value for name, value in pace.items() if name.endswith("late_steps"))
