"""The container side without an engine: lists, choices, command lines, the summary."""

from __future__ import annotations

import re
import tomllib

import pytest

from compose import role, summary
from compose.base_image import base_tag
from compose.command import CommandError, run
from compose.fault import FAULTS, main
from compose.paths import COMPOSE_FILE, REPOSITORY
from compose.wheelhouse import requirements
from engine.config import ServeConfig

REPORT = {
    "link": "shm",
    "reason": "asked for",
    "started_at": "2026-01-01T00:00:00Z",
    "machine": "x86_64",
    "server": {"device": "sim"},
    "figures": {"ttft_ms_p50": 1.25},
    "counters": {},
    "recovery_s": {"gpu-killed": 2.5},
    "tests": {"test_a.py::test_x": "passed", "test_a.py::test_y": "failed"},
}


def test_every_dependency_of_the_project_is_in_exactly_one_image_list() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lists = requirements()
    assert sorted(lists["smartnic"] + lists["gpu"]) == sorted(project["dependencies"])
    assert not any(line.startswith("torch") for line in lists["smartnic"])
    assert len(lists["load"]) == 1


def test_base_image_names_the_release_that_is_made_where_pulling_fails() -> None:
    assert re.fullmatch(r"debian:[a-z]+-slim", base_tag())


def test_every_service_of_a_stack_is_found_by_label() -> None:
    text = COMPOSE_FILE.read_text()
    services = text.split("\nservices:\n")[1].split("\nnetworks:\n")[0]
    blocks = re.split(r"\n(?=  [a-z-]+:\n)", services)
    stacked = [block for block in blocks if "profiles: [build]" not in block]
    assert len(stacked) >= 8
    assert all("blinkbed.stack" in block and "blinkbed.role" in block for block in stacked)


def test_role_gets_the_stacks_flags_and_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("BLINKBED_FLAGS", "--model scripted --ring-slots 32")
    monkeypatch.setenv("BLINKBED_RUNTIME_DIR", str(folder))
    config = role.config_of_container(["--port", "8001"])
    command = role.command_of("smartnic", config)
    assert command[1:3] == ["-m", "engine.smartnic"]
    written = ServeConfig.from_json((folder / "smartnic.json").read_text())
    assert (written.model.model, written.ring.num_slots, written.smartnic.port) == (
        "scripted",
        32,
        8001,
    )
    assert written.device_socket == folder / "device.sock"


def test_role_is_told_where_the_window_lies(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("BLINKBED_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    words = ["--window-offset", "{window_offset}"]
    assert role.with_window_facts(words) == words
    role.put_window_facts({"window_offset": 2097152, "window_bytes": 1})
    assert role.with_window_facts(words) == ["--window-offset", "2097152"]


def test_fault_command_lists_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in [*FAULTS, "heal"])


def test_failed_program_is_one_sentence_with_its_last_words() -> None:
    with pytest.raises(CommandError, match=r"^trying failed: first \| second$"):
        run(["sh", "-c", "echo first >&2; echo second >&2; exit 3"], what="trying")
    with pytest.raises(CommandError, match=r"^trying took longer than 0 s$"):
        run(["sleep", "9"], what="trying", timeout_s=0.05)
    with pytest.raises(CommandError, match="no-such-program"):
        run(["no-such-program"], what="trying")


def test_summary_says_what_was_real_and_what_failed() -> None:
    text = "\n".join(summary.lines(REPORT))
    assert "shm (asked for)" in text
    assert re.search(r"GPU +emulated", text)
    assert "1 failed, 1 passed" in text
    assert "FAILED test_a.py::test_y" in text
    assert re.search(r"gpu-killed +2.50", text)
