"""Which GID of a RoCE port to use: the address that an RDMA packet is sent from.

A port has several GIDs: link-local ones that never leave the segment, RoCE v1 twins, and those made
of the interface's IP addresses. The rule: RoCE v2, IPv4, routable; among those the address that the
handshake came over, else the first.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.link.verbs_errors import VerbsSetupError

SYSFS = Path("/sys/class/infiniband")
ROCE_V2 = "RoCE v2"


def gid_address(gid: str) -> str:
    """The IP address that a GID stands for, in its usual form."""
    address = ipaddress.IPv6Address(gid)
    return str(address.ipv4_mapped or address)


@dataclass(frozen=True, slots=True)
class GidEntry:
    """One line of a port's GID table."""

    index: int
    gid: str
    """As sysfs writes it: eight groups of four hex digits."""
    kind: str
    """ "RoCE v2" or "IB/RoCE v1"."""
    netdev: str

    @property
    def address(self) -> str:
        """Its IP address."""
        return gid_address(self.gid)

    @property
    def is_ipv4(self) -> bool:
        """Whether it stands for an IPv4 address."""
        return ipaddress.IPv6Address(self.gid).ipv4_mapped is not None

    @property
    def flaw(self) -> str:
        """Why packets from it do not reach a peer elsewhere; empty if they do."""
        if self.kind != ROCE_V2:
            return f"is {self.kind} and not routed"
        address = ipaddress.ip_address(self.address)
        if address.is_unspecified:
            return "is empty"
        if address.is_link_local:
            return "is link-local and not routed"
        if address.is_loopback or address.is_multicast:
            return "is no address of a network interface"
        return ""


def read_gid_table(device: str, port: int, sysfs: Path = SYSFS) -> list[GidEntry]:
    """The filled lines of a port's GID table."""
    folder = sysfs / device / "ports" / str(port)
    entries = []
    for path in sorted((folder / "gids").glob("*"), key=lambda path: int(path.name)):
        kind = _read(folder / "gid_attrs" / "types" / path.name)
        gid = _read(path)
        if gid and kind and not ipaddress.IPv6Address(gid).is_unspecified:
            netdev = _read(folder / "gid_attrs" / "ndevs" / path.name)
            entries.append(GidEntry(int(path.name), gid, kind, netdev))
    return entries


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # an empty line of the table: EINVAL
        return ""


def choose_gid(
    device: str,
    entries: Sequence[GidEntry],
    *,
    forced_index: int | None = None,
    near_address: str = "",
) -> GidEntry:
    """The entry to use; `near_address` is this host's address in the handshake.

    Raises VerbsSetupError when there is none, or when `forced_index` is one that cannot work: the
    text names the index, its address and the right candidate.
    """
    usable = [entry for entry in entries if not entry.flaw and entry.is_ipv4]
    best = next((entry for entry in usable if entry.address == near_address), None)
    best = best or (usable[0] if usable else None)
    if forced_index is not None:
        return _forced(device, entries, forced_index, best)
    if best is None:
        found = ", ".join(f"{entry.index}: {entry.address}" for entry in entries) or "none"
        raise VerbsSetupError(
            f"{device} has no routable IPv4 RoCE v2 GID (it has {found}); give its network "
            "interface an IPv4 address (ip address add A.B.C.D/N dev INTERFACE)"
        )
    return best


def _forced(
    device: str, entries: Sequence[GidEntry], index: int, best: GidEntry | None
) -> GidEntry:
    entry = next((entry for entry in entries if entry.index == index), None)
    if entry is not None and not entry.flaw:
        return entry
    what = "empty" if entry is None else f"{entry.address}, which {entry.flaw}"
    hint = f"use index {best.index} ({best.address})" if best else "there is no usable one"
    raise VerbsSetupError(f"GID index {index} of {device} is {what}; {hint}")
