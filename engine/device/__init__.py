"""The GPU of a stack as its host sees it: simulated or real, behind one interface."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from engine.config import ServeConfig
from engine.control import ControlPath
from engine.model.source import ModelSource
from engine.scheduler_memory import SchedulerMemory

MODULES = {"sim": "engine.device.sim", "cuda": "engine.device.cuda_device"}


class Window(Protocol):
    """The memory that the SmartNIC reaches: `nbytes` of it, at `offset` in the file `fd`."""

    array: Any
    """u8, shape [nbytes], as the device sees it."""
    fd: int
    nbytes: int
    offset: int
    home: str
    """Where it lies, in words."""
    handle: bytes
    """What opens it in another process where there is no file (`fd` is -1): CUDA's; else empty."""

    def close(self) -> None:
        """Give up the descriptor; idempotent."""


class Device(Protocol):
    """One GPU. Every method raises UserError where only the user can help."""

    xp: Any
    """CuPy, its simulator, or what stands between CuPy and us: a module or an object like it."""
    lost_errors: tuple[type[Exception], ...]
    """What calls raise once the device is gone."""

    def make_window(self, nbytes: int, path: Path | None, offset: int, home: str) -> Window:
        """Zeroed memory that another process can reach: new, or at `offset` in the file `path`.

        home: one of config.WINDOWS.
        """

    def persistent_path(
        self, config: ServeConfig, source: ModelSource, memory: SchedulerMemory
    ) -> ControlPath:
        """Load the model and build the graphs with which the device drives itself."""

    def host_driven_path(
        self,
        config: ServeConfig,
        source: ModelSource,
        memory: SchedulerMemory,
        device_memory: SchedulerMemory,
    ) -> ControlPath:
        """Load the model and build what the host launches for each pass. `memory` is the
        scheduler's, on the host; `device_memory` the pass's, on the device.
        """

    def map_window(self, window: Window) -> np.ndarray:
        """The window as memory of this process: u8, shape [window.nbytes]."""


def open_device(config: ServeConfig) -> Device:
    """The device that `config.device.device` names, bound to this stack."""
    module: ModuleType = importlib.import_module(MODULES[config.device.device])
    device: Device = module.open_device(config)
    return device
