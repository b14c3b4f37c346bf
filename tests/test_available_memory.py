"""Memory of the simulated GPU: the machine's, or the container's limit."""

from __future__ import annotations

from pathlib import Path

from engine.available_memory import available_memory_bytes


def files(base: Path, limit: str) -> tuple[Path, Path]:
    meminfo, cgroup = base / "meminfo", base / "cgroup"
    cgroup.mkdir()
    meminfo.write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 8000 kB\n")
    (cgroup / "memory.max").write_text(f"{limit}\n")
    (cgroup / "memory.current").write_text("3000000\n")
    (cgroup / "memory.stat").write_text("anon 5\ninactive_file 1000000\n")
    return meminfo, cgroup


def test_without_a_limit_it_is_what_the_kernel_says(tmp_path: Path) -> None:
    assert available_memory_bytes(*files(tmp_path, "max")) == 8000 << 10


def test_a_container_leaves_its_limit_less_what_is_used(tmp_path: Path) -> None:
    assert available_memory_bytes(*files(tmp_path, "6000000")) == 4_000_000


def test_an_overdrawn_container_leaves_nothing(tmp_path: Path) -> None:
    assert available_memory_bytes(*files(tmp_path, "1000000")) == 0


def test_a_machine_without_cgroups_is_no_error(tmp_path: Path) -> None:
    meminfo, _ = files(tmp_path, "max")
    assert available_memory_bytes(meminfo, tmp_path / "none") == 8000 << 10
