"""Settings of the verbs link."""

from __future__ import annotations

from dataclasses import dataclass

from engine.section import Section, option

HANDSHAKE_PORT = 18515
MAX_RETRY_COUNT = 6
"""Not 7, which Soft-RoCE takes for "for ever" (rxe_completer in rxe_comp.c): a dead peer would
never be noticed.
"""


@dataclass(frozen=True, slots=True)
class VerbsConfig(Section):
    """How this side's queue pairs are made. Both sides take the smaller MTU of the two."""

    device: str = option(
        "", "RDMA device, for example rxe0; empty takes the first one", flag="rdma-device"
    )
    device_port: int = option(1, "port of the RDMA device", flag="rdma-port")
    gid_index: int = option(
        -1, "line of the GID table; -1 chooses a routable IPv4 RoCE v2 one", flag="gid-index"
    )
    mtu: int = option(0, "path MTU in bytes at most; 0 takes what the port can do", flag="rdma-mtu")
    timeout: int = option(
        15, "time until a packet is sent again: 4.096 us * 2^timeout", flag="rdma-timeout"
    )
    retry_count: int = option(
        6, "times that a packet is sent again before the link is lost", flag="rdma-retry-count"
    )
    queue_depth: int = option(256, "work requests in flight at most", flag="rdma-queue-depth")
    inline_bytes: int = option(
        64, "WRITEs up to this size travel inside the work request", flag="rdma-inline-bytes"
    )

    def __post_init__(self) -> None:
        self._require_range("device_port", 1, 255)
        self._require_range("gid_index", -1, 65535)
        self._require_choice_of_mtu()
        self._require_range("timeout", 1, 31)
        self._require_range("retry_count", 0, MAX_RETRY_COUNT)
        self._require_power_of_two("queue_depth", 16, 4096)
        self._require_range("inline_bytes", 0, 256)

    def _require_choice_of_mtu(self) -> None:
        self._require(
            self.mtu in (0, *MTU_BYTES.values()), "mtu", f"must be one of {[*MTU_BYTES.values()]}"
        )

    @property
    def loss_s(self) -> float:
        """Time after which the hardware gives a silent peer up, seconds."""
        return float(4.096e-6 * 2**self.timeout * (self.retry_count + 1))


MTU_BYTES = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}
"""enum ibv_mtu -> bytes (InfiniBand specification, volume 1, section 9.4)."""

RNR_RETRY = 6
"""Bounded: 7 would mean for ever. One-sided operations consume no receive, so it never counts."""
