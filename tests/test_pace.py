"""The paced model: its time by the formula, profiles that are none, and counted lateness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.model.pace import PROFILES, Pace
from engine.model.source import open_model
from engine.model.spec import ModelError
from engine.stack import StackError
from tests.chat_client import complete, get
from tests.server import start_server

STEP_NS = 5_000_000.0
PROFILE = {
    "hardware": "a test", "measured": False, "date": "2026-12-01", "buckets": [8, 64],
    "base_ns": [STEP_NS, 2 * STEP_NS], "ns_per_decode_context": 0.0, "ns_per_prefill_pair": 0.0,
    "ns_per_prefill_context": 0.0,
}  # fmt: skip


def profile(folder: Path, **changes: object) -> Path:
    path = folder / "test.json"
    path.write_text(json.dumps({**PROFILE, **changes}))
    return path


def flags(folder: Path, **more: Any) -> dict[str, Any]:
    return {"model": f"paced:{profile(folder)}", "max_running": 2, **more}


def test_shipped_profiles_load() -> None:
    names = [path.stem for path in PROFILES.glob("*.json")]
    assert "8b-h200" in names
    for name in names:
        pace = Pace.load(name)
        assert pace.hardware
        assert open_model(f"paced:{name}").pace == pace


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"buckets": [8]}, "1 buckets and 2 times"),
        ({"buckets": [8, 8]}, "ascend"),
        ({"base_ns": [1.0, -1.0]}, "negative"),
        ({"base_ns": [1.0, float("nan")]}, "negative"),
        ({"ns_per_decode_context": None}, "TypeError"),
        ({"buckets": []}, "0 buckets"),
    ],
)
def test_what_is_no_profile_is_refused(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        Pace.load(str(profile(tmp_path, **changes)))


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(ModelError, match="8b-h200"):
        Pace.load("no-such-profile")


def test_steps_take_their_time_and_late_ones_are_counted(tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "model": f"paced:{profile(tmp_path)}",
        "max_running": 2,
        "max_step_tokens": 64,
    }
    with start_server(**flags) as server:
        before = metrics(server.url)
        text = complete(server.url, prompt="0123456789" * 5, max_tokens=60)["choices"][0]["text"]
        after = metrics(server.url)
    assert text == "0123456789" * 5
    steps = after["engine_steps_total"] - before["engine_steps_total"]
    assert steps == 51  # one of the prompt, which gives the first token, and 50 of one token
    # 50 of the narrow bucket, one of the wide one; never early, and late only where it is counted.
    took_s = after["engine_step_seconds_total"] - before["engine_step_seconds_total"]
    late_s = after["pace_late_seconds_total"] - before["pace_late_seconds_total"]
    least_s = (50 + 2) * STEP_NS / 1e9
    assert least_s <= took_s <= 1.06 * least_s + late_s


def metrics(url: str) -> dict[str, float]:
    body = get(f"{url}/metrics")[1].decode()
    pairs = (line.split() for line in body.splitlines() if line and line[0] != "#")
    return {name.removeprefix("blinkbed_"): float(value) for name, value in pairs}


def test_too_many_tokens_a_step_are_refused(tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "model": f"paced:{profile(tmp_path)}",
        "max_step_tokens": 65,
        "max_running": 2,
    }
    with pytest.raises(StackError, match="max-step-tokens"), start_server(**flags):
        pass
