"""Packets on the cable between the emulated machines, as a pcap that Wireshark dissects (RoCE v2 is
UDP port 4791). QEMU itself writes the file; the guests notice nothing.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Self

from emulation.vm.machine import Machine

ROCE_PORT = 4791
FILTER_ID = "capture"
GLOBAL_HEADER = struct.Struct("<IHHiIII")
RECORD_HEADER = struct.Struct("<IIII")
PCAP_MAGIC = 0xA1B2C3D4
MAX_PACKET_BYTES = 65536
ETHERNET_BYTES, IPV4, UDP = 14, 0x0800, 17


class Capture:
    """Everything that one machine sends and receives over the cable, into `path`, while entered."""

    def __init__(self, machine: Machine, path: Path) -> None:
        self._machine = machine
        self.path = path.absolute()

    def __enter__(self) -> Self:
        self._machine.qmp.execute(
            "object-add",
            **{
                "qom-type": "filter-dump",
                "id": FILTER_ID,
                "netdev": "cable",
                "file": str(self.path),
                "maxlen": MAX_PACKET_BYTES,
            },
        )
        return self

    def __exit__(self, *exc: object) -> None:
        if self._machine.process.poll() is None:
            self._machine.qmp.execute("object-del", id=FILTER_ID)


def roce_packets(path: Path) -> list[bytes]:
    """Payloads of the UDP packets to the RoCE v2 port, each beginning with InfiniBand's base
    transport header. ValueError for what is no pcap.
    """
    data = path.read_bytes()
    if len(data) < GLOBAL_HEADER.size or GLOBAL_HEADER.unpack_from(data)[0] != PCAP_MAGIC:
        raise ValueError(f"{path} is not a pcap file")
    packets = []
    at = GLOBAL_HEADER.size
    while at + RECORD_HEADER.size <= len(data):
        _, _, captured, _ = RECORD_HEADER.unpack_from(data, at)
        at += RECORD_HEADER.size
        payload = _roce_payload(data[at : at + captured])
        if payload is not None:
            packets.append(payload)
        at += captured
    return packets


def _roce_payload(frame: bytes) -> bytes | None:
    if len(frame) < ETHERNET_BYTES + 28 or int.from_bytes(frame[12:14], "big") != IPV4:
        return None
    start = ETHERNET_BYTES + 4 * (frame[ETHERNET_BYTES] & 15)
    is_roce = frame[ETHERNET_BYTES + 9] == UDP and (
        int.from_bytes(frame[start + 2 : start + 4], "big") == ROCE_PORT
    )
    return frame[start + 8 :] if is_roce else None
