"""``blinkbed doctor`` on findings as given, and its own checks on this host."""

from __future__ import annotations

import json

import pytest

from emulation import doctor, probe
from emulation.probe import RXE, SHM, VM, Check, Finding, Missing, perform
from engine.errors import UserError


def check(name: str, works: bool, *links: str) -> Check:
    def attempt() -> str:
        if not works:
            raise Missing("it is not there", "install it")
        return "it is there"

    return Check(name, attempt, links)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without RDMA in its kernel, with QEMU."""
    monkeypatch.setattr(doctor, "HOST_RDMA", (check("rdma_rxe module", False, RXE),))
    monkeypatch.setattr(doctor, "EMULATED", (check("QEMU", True, VM),))
    monkeypatch.setattr(doctor, "OTHERS", (check("GPU", False),))


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(("link", "status"), [("auto", 0), (VM, 0), (SHM, 0), (RXE, 3)])
def test_the_exit_status_is_3_when_the_asked_for_link_cannot_work(link: str, status: int) -> None:
    assert doctor.doctor(link=link) == status


@pytest.mark.usefixtures("host")
def test_each_failing_line_has_its_fix(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.doctor()
    lines = capsys.readouterr().out.splitlines()
    assert "no   rdma_rxe module: it is not there" in lines
    assert lines[lines.index("no   rdma_rxe module: it is not there") + 1].strip() == (
        "fix: install it"
    )
    assert lines[-1] == "--link auto works here: vm"


@pytest.mark.usefixtures("host")
def test_the_report_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.doctor(True, link=RXE) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["link"] is None
    assert report["links"] == [VM, SHM]
    assert [one["name"] for one in report["checks"]] == ["rdma_rxe module", "QEMU", "GPU"]


def test_an_unknown_link_is_refused() -> None:
    with pytest.raises(UserError, match="there is auto, rxe, vm, shm"):
        doctor.doctor(link="tcp")


def test_a_check_that_breaks_is_a_finding() -> None:
    def broken() -> str:
        raise OSError("no such device")

    finding = perform(Check("device", broken, (RXE,)))
    assert finding == Finding("device", False, "no such device", "see the message", (RXE,))


def test_this_host_has_shared_memory_a_compiler_and_an_answer_on_memlock() -> None:
    assert perform(Check("shared memory", probe.shared_memory)).works
    assert perform(Check("compiler", probe.compiler)).works
    assert "KiB" in perform(Check("memlock", probe.memlock)).detail


def test_shared_memory_is_chosen_where_asked_for() -> None:
    assert probe.choose_link(SHM).link == SHM


def test_the_choice_tells_what_was_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "HOST_RDMA", (check("rdma_rxe module", False, RXE),))
    monkeypatch.setattr(probe, "EMULATED", (check("QEMU", True, VM),))
    choice = probe.choose_link("auto")
    assert choice.link == VM
    assert "rdma_rxe module: it is not there" in choice.reason
    with pytest.raises(UserError, match="--link rxe cannot work here"):
        probe.choose_link(RXE)
