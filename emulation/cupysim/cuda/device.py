"""cupy.cuda.Device: the one simulated device of a client."""

from __future__ import annotations

from emulation.cupysim import client as client_module

COMPUTE_CAPABILITY = "90"  # device-side graph launch is a feature of this class of device


class Device:
    """Device 0; any other number raises."""

    def __init__(self, device: int | Device | None = None) -> None:
        self.id: int = device.id if isinstance(device, Device) else int(device or 0)
        if self.id != 0:
            raise ValueError(f"cupysim has one device, number 0; {self.id} was asked for")

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return self.id

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing to go back to: there is one device."""

    def use(self) -> Device:
        return self

    def synchronize(self) -> None:
        client_module.current().request("device_sync")

    @property
    def compute_capability(self) -> str:
        return COMPUTE_CAPABILITY

    @property
    def mem_info(self) -> tuple[int, int]:
        """(free, total) bytes."""
        free, total = client_module.current().request("mem_info")
        return int(free), int(total)

    @property
    def attributes(self) -> dict[str, int]:
        return {
            "ComputeCapabilityMajor": int(COMPUTE_CAPABILITY[0]),
            "ComputeCapabilityMinor": int(COMPUTE_CAPABILITY[1]),
            "MultiProcessorCount": 1,
            "MaxThreadsPerBlock": 1024,
            "WarpSize": 32,
        }


def get_device_id() -> int:
    return 0
