"""Opens the control path that the configuration names."""

from __future__ import annotations

import numpy as np

from engine.config import ServeConfig
from engine.control import ControlPath
from engine.device import Device, Window
from engine.model.source import ModelSource
from engine.scheduler_memory import ModelLimits, SchedulerMemory


def open_path(
    config: ServeConfig,
    device: Device,
    source: ModelSource,
    limits: ModelLimits,
    window: Window,
    epoch: int,
) -> ControlPath:
    """Lay out the scheduler's memory, load the model, build what the path launches.

    Raises UserError where only the user can help.
    """
    build = _persistent if config.path == "persistent" else _host_driven
    return build(config, device, source, limits, window, epoch)


def _host_driven(
    config: ServeConfig,
    device: Device,
    source: ModelSource,
    limits: ModelLimits,
    window: Window,
    epoch: int,
) -> ControlPath:
    """The scheduler's memory is the host's, and so is the loop; the device has the pass's."""
    on_device = SchedulerMemory(
        device.xp, window.array, config.ring, config.scheduler, limits, epoch
    )
    device.xp.cuda.Device().synchronize()
    mapped = device.map_window(window)
    memory = SchedulerMemory(np, mapped, config.ring, config.scheduler, limits, epoch)
    return device.host_driven_path(config, source, memory, on_device)


def _persistent(
    config: ServeConfig,
    device: Device,
    source: ModelSource,
    limits: ModelLimits,
    window: Window,
    epoch: int,
) -> ControlPath:
    """All of the scheduler's memory is the device's, and so is the loop."""
    memory = SchedulerMemory(
        device.xp,
        window.array,
        config.ring,
        config.scheduler,
        limits,
        epoch,
        timeline=bool(config.timeline),
    )
    return device.persistent_path(config, source, memory)
