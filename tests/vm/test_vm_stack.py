"""``blinkbed serve --link vm``: a whole stack whose SmartNIC and RNIC are emulated machines."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.freeze import Freeze
from tests.chat_client import get, scripted_canary
from tests.server import Server, start_server, wait_until

RECOVERY_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(link="vm") as running:
        yield running


def serves(server: Server) -> bool:
    return get(f"{server.url}/readyz")[0] == 200


def server_info(server: Server) -> dict[str, Any]:
    status, body = get(f"{server.url}/server_info")
    assert status == 200
    info: dict[str, Any] = json.loads(body)
    return info


def child_pids(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def test_the_link_is_rdma_and_said(server: Server) -> None:
    info = server_info(server)
    assert info["link"] == "vm"
    assert info["link_kind"] == "verbs"
    assert "RoCE v2" in info["link_description"]
    assert server.ready.link == "vm"
    assert server.ready.rnic_pid
    assert any("link vm: asked for" in line for line in server.log)


def test_a_frozen_host_changes_nothing(server: Server) -> None:
    with Freeze([server.pids["host"], server.pids["launcher"]]):
        assert scripted_canary(server.url) == "canary"
    assert scripted_canary(server.url) == "canary"


def test_the_rnic_s_machine_dies_and_service_comes_back(server: Server) -> None:
    (qemu,) = child_pids(server.ready.rnic_pid)
    os.kill(qemu, signal.SIGKILL)
    wait_until(lambda: not serves(server), RECOVERY_S, "the loss is noticed")
    wait_until(lambda: serves(server), RECOVERY_S, "a new machine serves the old window")
    assert scripted_canary(server.url) == "canary"
    assert server_info(server)["links_lost"] >= 1


def test_the_smartnic_s_machine_dies_and_service_comes_back(server: Server) -> None:
    (qemu,) = child_pids(server.ready.smartnic_pid)
    os.kill(qemu, signal.SIGKILL)
    wait_until(lambda: serves(server), RECOVERY_S, "a new machine takes the port over")
    assert server.ready.smartnic_pid not in child_pids(server.pids["launcher"])
    assert scripted_canary(server.url) == "canary"


def test_the_stack_drains_and_leaves_nothing() -> None:
    with start_server(link="vm") as running:
        assert scripted_canary(running.url) == "canary"
        machines = child_pids(running.ready.rnic_pid) + child_pids(running.ready.smartnic_pid)
        assert running.stack.stop() == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in machines)
