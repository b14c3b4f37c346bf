"""What a killed owner of emulated machines leaves behind is removed; captures are read."""

from __future__ import annotations

import os
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest

from emulation.capture import GLOBAL_HEADER, PCAP_MAGIC, RECORD_HEADER, roce_packets
from emulation.faults import Netem
from emulation.vm.pair import NAME, sweep, window_file_bytes
from engine.errors import UserError

MIB = 1 << 20


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_only_what_dead_owners_left_is_swept() -> None:
    temporary = Path(tempfile.gettempdir())
    left = temporary / f"{NAME}{dead_pid()}-test"
    kept = temporary / f"{NAME}{os.getpid()}-test"
    window = temporary / f"{left.name}.window"
    left.mkdir()
    kept.mkdir()
    window.touch()
    try:
        sweep()
        assert not left.exists()
        assert not window.exists()
        assert kept.exists()
    finally:
        kept.rmdir()


@pytest.mark.parametrize(
    ("wanted", "made"), [(1, 32), (28 * MIB, 32), (28 * MIB + 1, 48), (100 * MIB, 112)]
)
def test_the_windows_file_is_a_multiple_of_16_mib(wanted: int, made: int) -> None:
    assert window_file_bytes(wanted) == made * MIB


def frame(port: int, payload: bytes) -> bytes:
    ethernet = bytes(12) + b"\x08\x00"
    ip = bytes([0x45]) + bytes(8) + bytes([17]) + bytes(10)
    udp = struct.pack(">HHHH", 49152, port, 8 + len(payload), 0)
    return ethernet + ip + udp + payload


def test_roce_packets_are_picked_out_of_a_capture(tmp_path: Path) -> None:
    path = tmp_path / "wire.pcap"
    data = GLOBAL_HEADER.pack(PCAP_MAGIC, 2, 4, 0, 0, 65536, 1)
    for packet in (frame(4791, b"\x0a" + bytes(11)), frame(53, b"dns"), b"short"):
        data += RECORD_HEADER.pack(0, 0, len(packet), len(packet)) + packet
    path.write_bytes(data)
    assert roce_packets(path) == [b"\x0a" + bytes(11)]


def test_what_is_no_capture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wire.pcap"
    path.write_bytes(b"text")
    with pytest.raises(ValueError, match="not a pcap"):
        roce_packets(path)


def test_a_fault_becomes_words_of_tc() -> None:
    fault = Netem(loss_percent=5, delay_ms=2, jitter_ms=0.5, reorder_percent=25)
    assert " ".join(fault.command("eth0")) == (
        "tc qdisc replace dev eth0 root netem delay 2ms 0.5ms loss 5% reorder 25%"
    )


@pytest.mark.parametrize(
    "values", [{"loss_percent": 101}, {"delay_ms": -1}, {"reorder_percent": 5}]
)
def test_an_impossible_fault_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(UserError):
        Netem(**values)
