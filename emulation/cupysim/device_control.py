"""Steering the device process itself, outside CuPy's interface."""

from __future__ import annotations

import os

from emulation.cupysim import client as client_module
from emulation.cupysim.cuda.memory import default_pool


def device_pid() -> int:
    """Process id of the device in use."""
    return int(client_module.current().device_pid)


def graph_counters() -> tuple[int, int]:
    """(graph runs, launches made from the device) since the device started."""
    runs, launches = client_module.current().request("counters")
    return int(runs), int(launches)


def check() -> None:
    """Raises CUDARuntimeError where the device has failed or is gone."""
    client_module.current().request("check")


def shutdown() -> None:
    """Ends the device process, whatever it runs; the next use connects to another."""
    client_module.current().shutdown()
    disconnect()


def disconnect() -> None:
    """Leaves the device to itself; what it runs goes on. Arrays of it are useless afterwards."""
    client_module.disconnect()
    default_pool.reset()


def use_device(socket_path: str | os.PathLike[str]) -> None:
    """Makes the device that listens at `socket_path` the one to use from now on."""
    disconnect()
    os.environ["CUPYSIM_DEVICE"] = os.fspath(socket_path)
