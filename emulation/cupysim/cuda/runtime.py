"""The part of cupy.cuda.runtime that programs over cupysim need."""

from __future__ import annotations

from typing import Any

from emulation.cupysim import client as client_module
from emulation.cupysim import errors
from emulation.cupysim.cuda.device import COMPUTE_CAPABILITY
from emulation.cupysim.errors import CUDARuntimeError

__all__ = ["CUDARuntimeError"]

memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost = 0, 1, 2  # noqa: N816 - CUDA's names
memcpyDeviceToDevice, memcpyDefault = 3, 4  # noqa: N816
streamCaptureModeGlobal, streamCaptureModeThreadLocal = 0, 1  # noqa: N816
streamCaptureModeRelaxed = 2  # noqa: N816
streamNonBlocking = 1  # noqa: N816


def getDeviceCount() -> int:  # noqa: N802
    return 1


def getDevice() -> int:  # noqa: N802
    return 0


def setDevice(device: int) -> None:  # noqa: N802
    if device != 0:
        raise CUDARuntimeError(errors.INVALID_VALUE, f"there is no device {device}")


def getDeviceProperties(device: int) -> dict[str, Any]:  # noqa: N802
    setDevice(device)
    return {
        "name": b"cupysim simulated device",
        "totalGlobalMem": memGetInfo()[1],
        "multiProcessorCount": 1,
        "major": int(COMPUTE_CAPABILITY[0]),
        "minor": int(COMPUTE_CAPABILITY[1]),
        "warpSize": 32,
    }


def runtimeGetVersion() -> int:  # noqa: N802
    return 12040


def driverGetVersion() -> int:  # noqa: N802
    return 12040


def memGetInfo() -> tuple[int, int]:  # noqa: N802
    free, total = client_module.current().request("mem_info")
    return int(free), int(total)


def deviceSynchronize() -> None:  # noqa: N802
    client_module.current().request("device_sync")


def streamSynchronize(stream: int) -> None:  # noqa: N802
    client_module.current().request("sync", stream)


def graphLaunch(graph_exec: int, stream: int) -> None:  # noqa: N802
    client_module.current().post("graph_launch", stream, graph_exec)


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
    """Between device addresses; other kinds go through ndarray.get and set."""
    if kind not in (memcpyDeviceToDevice, memcpyDefault):
        raise CUDARuntimeError(
            errors.INVALID_VALUE, "cupysim copies to and from the host with ndarray.set and get"
        )
    client_module.current().post("copy", stream, dst, src, size)


def memcpy(dst: int, src: int, size: int, kind: int) -> None:
    memcpyAsync(dst, src, size, kind, 0)


def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:  # noqa: N802
    client_module.current().post("fill", stream, ptr, value & 0xFF, size)


def memset(ptr: int, value: int, size: int) -> None:
    memsetAsync(ptr, value, size, 0)
