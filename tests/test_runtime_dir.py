"""The private folder of a stack, and what a killed launcher left."""

from __future__ import annotations

import os
import time
from pathlib import Path

from engine.runtime_dir import LOCK_NAME, PREFIX, STALE_AGE_S, RuntimeDir


def abandoned(base: Path, age_s: float) -> Path:
    folder = base / f"{PREFIX}left"
    folder.mkdir()
    lock = folder / LOCK_NAME
    lock.touch()
    when = time.time() - age_s
    os.utime(lock, (when, when))
    return folder


def test_two_folders_differ_and_go_when_closed(tmp_path: Path) -> None:
    with RuntimeDir(tmp_path) as one, RuntimeDir(tmp_path) as two:
        assert one.path != two.path
        assert one.path.stat().st_mode & 0o777 == 0o700
        (one.path / "device.sock").touch()
    assert list(tmp_path.iterdir()) == []


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    folder = RuntimeDir(tmp_path)
    folder.close()
    folder.close()


def test_what_a_killed_launcher_left_is_removed(tmp_path: Path) -> None:
    left = abandoned(tmp_path, 2 * STALE_AGE_S)
    with RuntimeDir(tmp_path):
        assert not left.exists()


def test_a_folder_in_use_or_just_made_is_kept(tmp_path: Path) -> None:
    young = abandoned(tmp_path, 0)
    with RuntimeDir(tmp_path) as used:
        when = time.time() - 2 * STALE_AGE_S
        os.utime(used.path / LOCK_NAME, (when, when))
        with RuntimeDir(tmp_path):
            assert used.path.exists()
            assert young.exists()
