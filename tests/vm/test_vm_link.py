"""The verbs link by true RDMA between two emulated machines: our SmartNIC's code in one, the RNIC
in the other, and the scheduler on the host over the window's file.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from emulation.capture import Capture, roce_packets
from emulation.faults import TOTAL_LOSS, Netem
from emulation.vm.agent_client import GuestProcess
from emulation.vm.machine import QEMU
from emulation.vm.pair import RNIC, RNIC_ADDRESS, SMARTNIC, EmulatedPair
from engine.config import RingConfig
from loadtests.window_engine import WindowEngine

pytestmark = [
    pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"{QEMU} is not installed"),
    pytest.mark.timeout(600),
]
CLIENT = Path(__file__).parent / "verbs_client.py"
GUEST_CLIENT = "/root/verbs_client.py"
ATTACK = "/opt/blinkbed/attack.py"
STEP_S = 150.0
# Base transport header, first byte (InfiniBand specification, volume 1, table 38).
RC_WRITE_ONLY, RC_READ_REQUEST, RC_READ_RESPONSE_ONLY, RC_ACKNOWLEDGE = 0x0A, 0x0C, 0x10, 0x11
RING = RingConfig(num_slots=64, token_ring_entries=4096)


class Stand:
    """Both machines, the engine, and the RNIC's program."""

    def __init__(self, pair: EmulatedPair, engine: WindowEngine) -> None:
        self.pair, self.engine = pair, engine
        self.start_rnic()
        pair.machines[SMARTNIC].agent.put(GUEST_CLIENT, CLIENT.read_bytes())

    def start_rnic(self) -> None:
        command = ["python3", "-S", "-m", "engine.link.rnic", "--window", "/dev/dax0.0"]
        self.rnic = self.pair.start(RNIC, [*command, "--listen", RNIC_ADDRESS])
        assert json.loads(self.rnic.read_line(STEP_S))["event"] == "ready"

    def start(self, scenario: str, **options: Any) -> GuestProcess:
        arguments = json.dumps({"host": RNIC_ADDRESS, **options})
        return self.pair.start(SMARTNIC, ["python3", "-S", GUEST_CLIENT, scenario, arguments])

    def run(self, scenario: str, **options: Any) -> dict[str, Any]:
        """The scenario's last line."""
        output = self.start(scenario, **options).check(STEP_S)
        result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
        return result

    def attack(self, name: str, **options: Any) -> dict[str, Any]:
        """Run one of emulation/vm/guest/attack.py; the facts that it prints."""
        arguments = json.dumps({"host": RNIC_ADDRESS, **options})
        process = self.pair.start(SMARTNIC, ["python3", "-S", ATTACK, name, arguments])
        process.wait(STEP_S)
        facts: dict[str, Any] = json.loads(process.output.strip().splitlines()[-1])
        return facts


@pytest.fixture(scope="module")
def machines() -> Iterator[Stand]:
    with (
        EmulatedPair() as pair,
        WindowEngine(pair.window_path, pair.window_offset, pair.window_bytes, RING) as engine,
    ):
        yield Stand(pair, engine)


@pytest.fixture
def stand(machines: Stand) -> Iterator[Stand]:
    yield machines
    machines.pair.heal()


def read_json(process: GuestProcess) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(process.read_line(STEP_S))
    return answer


def test_machines_are_ready_for_rdma_within_20_s(machines: Stand) -> None:
    # In time of a processor, each machine having one: others may be at work on this host.
    assert max(machines.pair.ready_cpu_s.values()) < 20


def test_tokens_of_200_requests_with_32_in_flight_are_exact(stand: Stand) -> None:
    result = stand.run("requests", count=200, in_flight=32)
    assert (result["ended"], result["wrong"]) == (200, [])
    assert result["state"] == "RTS"
    assert "path MTU 4096" in result["description"]
    assert result["window"] == "nvdimm"


@pytest.mark.parametrize(
    ("smartnic_mtu", "rnic_mtu", "path_mtu"), [(1500, 1500, 1024), (1500, 4200, 1024)]
)
def test_every_size_arrives_at_small_and_mixed_mtus(
    stand: Stand, smartnic_mtu: int, rnic_mtu: int, path_mtu: int
) -> None:
    for role, mtu in ((SMARTNIC, smartnic_mtu), (RNIC, rnic_mtu)):
        stand.pair.run(role, ["ip", "link", "set", "eth0", "mtu", str(mtu)])
    try:
        result = stand.run("probe", mtu=path_mtu)
    finally:
        for role in (SMARTNIC, RNIC):
            stand.pair.run(role, ["ip", "link", "set", "eth0", "mtu", "4200"])
    assert result["bad"] == []
    assert f"path MTU {path_mtu}" in result["description"]


def test_every_size_arrives_at_a_large_mtu(stand: Stand) -> None:
    assert stand.run("probe", mtu=4096)["bad"] == []


def test_the_wire_carries_rocev2_writes_and_reads(stand: Stand, tmp_path: Path) -> None:
    with Capture(stand.pair.machines[SMARTNIC], tmp_path / "wire.pcap") as capture:
        stand.run("requests", count=8, in_flight=4)
    opcodes = {packet[0] for packet in roce_packets(capture.path)}
    assert {RC_WRITE_ONLY, RC_READ_REQUEST, RC_READ_RESPONSE_ONLY, RC_ACKNOWLEDGE} <= opcodes


def test_a_killed_smartnic_is_replaced_and_its_requests_are_dropped(stand: Stand) -> None:
    holder = stand.start("hold", count=16)
    session = read_json(holder)["session"]
    holder.signal(9)
    assert holder.wait(STEP_S) == -9
    result = stand.run("requests", count=32, in_flight=32)
    assert (result["ended"], result["wrong"]) == (32, [])
    assert session > 0


def test_a_replaced_smartnic_can_write_nothing_more(stand: Stand) -> None:
    result = stand.run("stale")
    assert "the other side does not answer" in result["refused"]
    assert result["intact"]
    assert (result["ended"], result["wrong"]) == (8, [])


def test_a_key_of_an_earlier_session_is_refused(stand: Stand) -> None:
    result = stand.attack("stale-rkey")
    assert "IBV_WC_REM_ACCESS_ERR" in result["refused"]
    assert result["intact"]


def test_memory_outside_the_port_is_refused(stand: Stand) -> None:
    end = stand.engine.geometry.port_bytes
    before = bytes(stand.engine.memory[end : end + 4096])
    result = stand.attack("outside")
    assert all("IBV_WC_REM_ACCESS_ERR" in text for text in result["refused"])
    assert bytes(stand.engine.memory[end : end + 4096]) == before


def test_a_record_of_an_earlier_epoch_is_not_executed(stand: Stand) -> None:
    assert stand.attack("stale-epoch")["reasons"] == ["ERROR_EPOCH"]


def test_no_torn_record_is_executed_over_rdma(stand: Stand) -> None:
    facts = stand.attack("ring-torture", seconds=10)
    assert (facts["wrong"], set(facts["reasons"])) == (0, {"STOP"})
    assert facts["ended"] == facts["posted"] > 100
    assert facts["looks_at_torn_records"] > 0


def test_a_queue_pair_in_error_is_reported_and_a_new_link_works(stand: Stand) -> None:
    process = stand.start("reconnect")
    assert read_json(process)["connected"]
    stand.rnic.signal(signal.SIGUSR1)
    assert read_json(process)["lost"]
    result = read_json(process)
    assert (result["ended"], result["wrong"]) == (8, [])


def test_a_forced_link_local_gid_fails_with_the_right_candidate(stand: Stand) -> None:
    started = time.monotonic()
    process = stand.start("requests", count=1, in_flight=1, verbs={"gid_index": 0})
    assert process.wait(STEP_S) == 1
    text = read_json(process)["error"]
    assert "GID index 0 of rxe0 is fe80::" in text
    assert "use index 1 (10.9.0.2)" in text
    assert time.monotonic() - started < 30  # most of it is Python's start in the machine


def test_too_little_locked_memory_fails_with_limit_need_and_fix(stand: Stand) -> None:
    text = stand.run("memlock")["refused"]
    assert "is 64 KiB" in text
    assert "ulimits: {memlock: -1}" in text


@pytest.mark.parametrize(
    "fault",
    [
        Netem(loss_percent=1),
        Netem(loss_percent=5),
        Netem(delay_ms=5, jitter_ms=2),
        Netem(duplicate_percent=10),
        Netem(delay_ms=5, reorder_percent=30),
        Netem(corrupt_percent=2),
    ],
    ids=lambda fault: " ".join(fault.arguments()),
)
def test_tokens_are_exact_over_an_impaired_wire(stand: Stand, fault: Netem) -> None:
    before = {name: stand.engine.counter(name) for name in ("records_torn", "records_rejected")}
    stand.pair.impair(fault)
    result = stand.run("requests", count=60, in_flight=32)
    assert (result["ended"], result["wrong"]) == (60, [])
    assert stand.engine.counter("records_rejected") == before["records_rejected"]
    assert stand.engine.counter("records_torn") - before["records_torn"] < 60


def test_total_loss_is_reported_and_a_new_link_works_after_it(stand: Stand) -> None:
    process = stand.start("reconnect")
    assert read_json(process)["connected"]
    stand.pair.impair(TOTAL_LOSS)
    # Retries run out, or, where the machines get too little of the processor, our own patience.
    lost = read_json(process)["lost"]
    assert "the other side does not answer" in lost or "no completion of an RDMA" in lost
    time.sleep(3)  # the loss's own length, not a synchronisation
    stand.pair.heal()
    result = read_json(process)
    assert (result["ended"], result["wrong"]) == (8, [])


def test_a_pulled_cable_is_reported_and_a_new_link_works_after_it(stand: Stand) -> None:
    process = stand.start("reconnect")
    assert read_json(process)["connected"]
    stand.pair.link_down()
    assert read_json(process)["lost"]
    stand.pair.link_up()
    result = read_json(process)
    assert (result["ended"], result["wrong"]) == (8, [])


def test_a_paused_rnic_machine_is_survived(stand: Stand) -> None:
    process = stand.start("reconnect")
    assert read_json(process)["connected"]
    stand.pair.pause(RNIC)
    try:
        assert read_json(process)["lost"]
    finally:
        stand.pair.resume(RNIC)
    result = read_json(process)
    assert (result["ended"], result["wrong"]) == (8, [])


def test_a_restart_of_the_engine_ends_old_links_and_serves_new_ones(stand: Stand) -> None:
    process = stand.start("reconnect")
    assert read_json(process)["connected"]
    stand.engine.start()
    assert read_json(process)["lost"]
    result = read_json(process)
    assert (result["ended"], result["wrong"]) == (8, [])


def test_a_killed_rnic_machine_is_replaced_with_the_window_intact(stand: Stand) -> None:
    process = stand.start("reconnect")
    assert read_json(process)["connected"]
    stand.pair.kill(RNIC)
    assert read_json(process)["lost"]
    stand.pair.restart(RNIC)
    stand.start_rnic()
    result = read_json(process)
    assert (result["ended"], result["wrong"]) == (8, [])


def test_nothing_is_left_of_the_machines() -> None:
    with EmulatedPair() as pair:
        folder, window = pair.folder, pair.window_path
        pids = [machine.pid for machine in pair.machines.values()]
    assert not folder.exists()
    assert not window.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
