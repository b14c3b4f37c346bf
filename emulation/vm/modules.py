"""Kernel modules in the order in which insmod can load them, by depmod's own reckoning."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from emulation.vm.elf import loader_command
from engine.errors import UserError


def kernel_release(root: Path) -> str:
    """The kernel version whose modules are in `root`."""
    releases = sorted(path.name for path in (root / "usr/lib/modules").iterdir())
    if len(releases) != 1:
        raise UserError(f"{root} must hold the modules of one kernel, not of {len(releases)}")
    return releases[0]


def load_order(root: Path, names: Iterable[str]) -> list[Path]:
    """Paths of the modules and of those they depend on, dependencies first.

    A name without a file is built into the kernel and left out.
    """
    release = kernel_release(root)
    folder = root / "usr/lib/modules" / release
    if not (folder / "modules.dep").exists():
        depmod = loader_command(root, "usr/bin/kmod", as_name="depmod")
        subprocess.run([*depmod, "-b", str(root), release], check=True, capture_output=True)
    dependencies: dict[str, list[str]] = {}
    paths: dict[str, str] = {}
    for line in (folder / "modules.dep").read_text().splitlines():
        path, _, needs = line.partition(":")
        paths[_name(path)] = path
        dependencies[path] = needs.split()
    ordered: list[str] = []
    for name in names:
        path = paths.get(name, "")
        # modules.dep lists what a module needs with the farthest dependency last.
        for one in [*reversed(dependencies.get(path, [])), path]:
            if one and one not in ordered:
                ordered.append(one)
    return [folder / path for path in ordered]


def _name(path: str) -> str:
    return Path(path).name.split(".")[0].replace("-", "_")
