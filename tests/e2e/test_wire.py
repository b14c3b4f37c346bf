"""Faults of the wire between the two machines, and proof of what is on it. Collected on the link
vm alone: only there is a wire that we may spoil.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from compose import guest
from compose.fault import DEFAULT, FAULTS, Options, attack, heal
from compose.paths import REPOSITORY
from compose.stack import ContainerStack
from tests.chat_client import get
from tests.e2e.client import run_streams
from tests.e2e.conftest import server_info
from tests.e2e.report import Report
from tests.e2e.test_faults import heal_and_measure, traffic_on
from tests.e2e.test_streams import say
from tests.http_client import wait_idle
from tests.server import wait_until

PCAP = REPOSITORY / "results" / "e2e.pcap"
NUM_STREAMS = 8
TEXT = "0123456789abcdef" * 8
CUT_S = 30.0
TORTURE_S = 60.0
RC_WRITE_OPCODES = {6, 7, 8, 10}  # InfiniBand specification, volume 1, table 38
RC_READ_REQUEST = 12

SPOILED = {
    "loss of 1 %": ("loss", Options(1, 0)),
    "loss of 5 %": ("loss", Options(5, 0)),
    "delay": ("delay", Options(0, 5)),
    "duplication": ("duplication", Options(5, 0)),
    "reordering": ("reordering", Options(25, 2)),
    "corruption": ("corruption", Options(1, 0)),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_wire_spoils_no_answer(scripted: ContainerStack, name: str) -> None:
    fault, options = SPOILED[name]
    FAULTS[fault].apply(scripted, options)
    try:
        replies = run_streams(scripted.url, [say(TEXT) for _ in range(NUM_STREAMS)])
    finally:
        heal(scripted)
    assert [reply.ends for reply in replies] == [["stop"]] * NUM_STREAMS
    assert all(reply.text == TEXT for reply in replies)
    wait_idle(scripted.url, timeout_s=10)


def test_cable_unplugged_and_plugged_in(scripted: ContainerStack, report: Report) -> None:
    with traffic_on(scripted) as traffic:
        FAULTS["link-down"].apply(scripted, DEFAULT)
        wait_until(
            lambda: any(r.ends == ["status 503"] for r in list(traffic.replies)),
            CUT_S,
            "new requests are refused",
        )
        heal_and_measure(scripted, report, "link-down")
    assert all(len(reply.ends) == 1 for reply in traffic.replies)
    wait_idle(scripted.url, timeout_s=10)


def test_total_loss_ends_and_service_is_back(scripted: ContainerStack, report: Report) -> None:
    with traffic_on(scripted) as traffic:
        FAULTS["loss"].apply(scripted, Options(100, 0))
        began = time.monotonic()
        wait_until(lambda: get(f"{scripted.url}/readyz")[0] == 503, CUT_S, "/readyz is 503")
        time.sleep(max(0.0, began + CUT_S - time.monotonic()))  # the length of the loss
        heal_and_measure(scripted, report, "total loss of 30 s")
        assert report.recovery_s["total loss of 30 s"] < 10
    assert all(len(reply.ends) == 1 for reply in traffic.replies)
    wait_idle(scripted.url, timeout_s=10)


def test_queue_pairs_in_error_are_replaced(scripted: ContainerStack, report: Report) -> None:
    before = server_info(scripted.url)["links_lost"]
    with traffic_on(scripted) as traffic:
        FAULTS["qp-error"].apply(scripted, DEFAULT)
        wait_until(
            lambda: server_info(scripted.url).get("links_lost") != before, CUT_S, "the link is lost"
        )
        heal_and_measure(scripted, report, "qp-error")
    assert all(len(reply.ends) == 1 for reply in traffic.replies)
    wait_idle(scripted.url, timeout_s=10)


@pytest.mark.parametrize("name", ["stale-rkey", "outside", "stale-epoch"])
def test_what_no_honest_smartnic_does_is_refused(scripted: ContainerStack, name: str) -> None:
    with traffic_on(scripted) as traffic:
        facts = attack(scripted, name)
    assert facts["stood"], facts
    assert traffic.replies
    assert all(reply.ends == ["stop"] for reply in traffic.replies)


def test_no_torn_record_is_executed(scripted: ContainerStack, report: Report) -> None:
    facts = attack(scripted, "ring-torture", seconds=TORTURE_S)
    assert facts["stood"], facts
    assert facts["wrong"] == 0
    assert facts["early_doorbells"] > 0
    report.figures["records under ring torture"] = facts["posted"]
    report.figures["looks at torn records"] = facts["looks_at_torn_records"]


def test_requests_and_tokens_are_roce_packets(scripted: ContainerStack) -> None:
    with guest.capture(scripted.container("smartnic"), PCAP):
        (reply,) = run_streams(scripted.url, [say("on the wire")])
    assert reply.is_complete
    opcodes = dissect(PCAP)
    assert RC_WRITE_OPCODES & opcodes
    assert RC_READ_REQUEST in opcodes


def dissect(path: Path) -> set[int]:
    """Opcodes of the InfiniBand packets in a capture, by tshark."""
    command = ["tshark", "-r", str(path), "-Y", "infiniband", "-T", "fields"]
    command += ["-e", "infiniband.bth.opcode"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return {int(word, 0) for word in done.stdout.replace(",", "\n").split()}
