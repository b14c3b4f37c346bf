"""A SmartNIC before a native device loop (tests.native_device): starts fast, at a chosen pace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.child import Child
from engine.config import ModelConfig, RingConfig, SchedulerConfig, ServeConfig, SmartnicConfig
from engine.progress import Report

READY_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class NativeStack:
    """Two processes and where they listen."""

    url: str
    device: subprocess.Popen[bytes]
    smartnic: subprocess.Popen[bytes]
    log_path: Path

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by role."""
        return {"device": self.device.pid, "smartnic": self.smartnic.pid}


@contextmanager
def start_native(
    *,
    step_us: int = 0,
    ring: RingConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    smartnic: SmartnicConfig | None = None,
    model: str = "scripted",
) -> Iterator[NativeStack]:
    """Start both on a free port; each step of the device takes `step_us` and then some."""
    with tempfile.TemporaryDirectory() as folder:
        config = ServeConfig(
            model=ModelConfig(model),
            ring=ring or RingConfig(),
            scheduler=scheduler or SchedulerConfig(),
            smartnic=smartnic or SmartnicConfig(port=0),
            runtime_dir=folder,
        )
        config_path = Path(folder, "config.json")
        config_path.write_text(config.to_json())
        log_path = Path(folder, "smartnic.log")
        arguments = ["--config", str(config_path)]
        command = [sys.executable, "-m", "tests.native_device", *arguments]
        device = subprocess.Popen([*command, f"--step-us={step_us}"])
        child = Child(
            "smartnic",
            [sys.executable, "-m", "engine.smartnic", *arguments],
            log_path=log_path,
            environment=os.environ,
        )
        try:
            url = str(wait_ready(child).facts["url"])
            yield NativeStack(url, device, child.process, log_path)
        finally:
            child.close()
            device.send_signal(signal.SIGKILL)
            device.wait()


def wait_ready(child: Child) -> Report:
    """The child's ready report; raises RuntimeError when it ends or the time is up."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        child.read_reports()
        if child.ready is not None:
            return child.ready
        if child.failure is not None or not child.is_running or time.monotonic() > deadline:
            raise RuntimeError(f"the SmartNIC did not start: {child.last_words()}")
        time.sleep(0.02)
