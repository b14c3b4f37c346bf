"""An opened RDMA device: protection domain, the chosen GID, the MTU."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any, Self

from engine.link.verbs_config import MTU_BYTES, VerbsConfig
from engine.link.verbs_errors import VerbsSetupError, enums, pyverbs, verb
from engine.link.verbs_gid import SYSFS, GidEntry, choose_gid, read_gid_table


def device_names(sysfs: Path = SYSFS) -> list[str]:
    """RDMA devices of this host."""
    return sorted(path.name for path in sysfs.glob("*"))


class VerbsDevice:
    """A device and a protection domain on it. A context manager; `close` is idempotent.

    near_address: this host's address in the handshake, a hint for the GID.
    Raises VerbsSetupError.
    """

    def __init__(self, config: VerbsConfig, *, near_address: str = "") -> None:
        names = device_names()
        self.name = config.device or (names[0] if names else "")
        if self.name not in names:
            wanted = f"no RDMA device {self.name}" if self.name else "no RDMA device"
            raise VerbsSetupError(
                f"there is {wanted} here (there is: {', '.join(names) or 'none'}); "
                "'blinkbed doctor' says how to get one"
            )
        self.port = config.device_port
        forced = None if config.gid_index < 0 else config.gid_index
        table = read_gid_table(self.name, self.port)
        self.gid: GidEntry = choose_gid(
            self.name, table, forced_index=forced, near_address=near_address
        )
        device = pyverbs("device")
        with verb(f"ibv_open_device({self.name})"):
            self.context: Any = device.Context(name=self.name)
        with verb("ibv_query_port"):
            attributes = self.context.query_port(self.port)
        if attributes.state != enums().IBV_PORT_ACTIVE:
            raise VerbsSetupError(
                f"port {self.port} of {self.name} is not active; bring its network interface up "
                f"(ip link set {self.gid.netdev or 'INTERFACE'} up)"
            )
        self.mtu_bytes: int = MTU_BYTES[attributes.active_mtu]
        if config.mtu:
            self.mtu_bytes = min(self.mtu_bytes, config.mtu)
        with verb("ibv_alloc_pd"):
            self.pd: Any = pyverbs("pd").PD(self.context)

    def register(self, num_bytes: int, access: int, address: int | None = None) -> Any:
        """A memory region over `num_bytes` at `address`, or over memory of its own.

        Raises VerbsSetupError naming limit and need where the memory may not be locked.
        """
        try:
            with verb(f"ibv_reg_mr of {num_bytes} bytes"):
                return pyverbs("mr").MR(self.pd, num_bytes, access, address=address)
        except Exception as error:
            raise VerbsSetupError(_registration_failure(num_bytes, str(error))) from error

    @property
    def description(self) -> str:
        """Device, GID and MTU in words."""
        return (
            f"{self.name} GID {self.gid.index} ({self.gid.address}, {self.gid.kind}), "
            f"port MTU {self.mtu_bytes}"
        )

    def close(self) -> None:
        """Close domain and device; what was made on them goes first."""
        self.pd.close()
        self.context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _registration_failure(num_bytes: int, reason: str) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or limit >= num_bytes or os.geteuid() == 0:
        return reason
    return (
        f"{reason}: the limit of locked memory (ulimit -l) is {limit >> 10} KiB and "
        f"{-(-num_bytes >> 10)} KiB are needed; raise it (in compose.yaml: "
        "'ulimits: {memlock: -1}')"
    )
