"""The simulated GPU (emulation.cupysim): a process of its own that runs what is launched on it."""

from __future__ import annotations

import importlib
import mmap
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from engine import progress
from engine.config import ServeConfig
from engine.control.host_driven import DEPTHS, CapturedPass, HostDrivenLoop
from engine.control.persistent import PersistentLoop, kernel_module
from engine.device import Window
from engine.model.source import ModelSource
from engine.model_pass import model_pass
from engine.scheduler_memory import SchedulerMemory

LIBRARY = "emulation.cupysim"


class SimDevice:
    """See engine.device.Device."""

    def __init__(self, library: ModuleType) -> None:
        self.xp: Any = library
        self.lost_errors: tuple[type[Exception], ...] = (library.cuda.runtime.CUDARuntimeError,)

    def make_window(self, nbytes: int, path: Path | None, offset: int, home: str) -> Window:
        """Device memory that is exported; with `path`, that file mapped into the device."""
        window: Window = self.xp.cuda.export.SharedWindow(nbytes, path=path, offset=offset)
        if path is not None:
            window.array.fill(0)
        return window

    def persistent_path(
        self, config: ServeConfig, source: ModelSource, memory: SchedulerMemory
    ) -> PersistentLoop:
        """Load the model and capture the step graphs."""
        progress.progress("building the device's kernels, at the first start")
        module = kernel_module(self.xp)
        launch_pass = model_pass(self.xp, config, source, memory, module)
        progress.progress("capturing step graphs")
        return PersistentLoop(self.xp, memory, module, launch_pass)

    def host_driven_path(
        self,
        config: ServeConfig,
        source: ModelSource,
        memory: SchedulerMemory,
        device_memory: SchedulerMemory,
    ) -> HostDrivenLoop:
        """Load the model and capture the pass, once for each set of buffers."""
        progress.progress("building the device's kernels, at the first start")
        kernels = kernel_module(self.xp)
        launch_pass = model_pass(self.xp, config, source, device_memory, kernels)
        module = kernel_module(self.xp, "host_driven")
        launcher = CapturedPass(self.xp, device_memory, module, launch_pass)
        return HostDrivenLoop(self.xp, memory, launcher, depth=DEPTHS[config.path])

    def map_window(self, window: Window) -> np.ndarray:
        """The window as memory of this process."""
        mapping = mmap.mmap(window.fd, window.nbytes, offset=window.offset)
        return np.frombuffer(mapping, np.uint8)


def open_device(config: ServeConfig) -> SimDevice:
    """The device process of this stack."""
    os.environ["CUPYSIM_DEVICE"] = str(config.device_socket)
    return SimDevice(importlib.import_module(LIBRARY))
