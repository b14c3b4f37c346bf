"""Which shared libraries a set of programs needs, read from the files themselves."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from engine.errors import UserError

LIBRARY_FOLDERS = ("usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib")
LOADER = "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"


def loader_command(root: Path, program: str, *, as_name: str | None = None) -> list[str]:
    """How a program of `root` is run on the host, with its own loader and libraries, no chroot."""
    libraries = root / "usr/lib/x86_64-linux-gnu"
    command = [str(root / LOADER), "--library-path", str(libraries)]
    if as_name is not None:
        command += ["--argv0", as_name]
    return [*command, str(root / program)]


def is_elf(path: Path) -> bool:
    """Whether a file is a program or a library."""
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _needed(files: Iterable[Path]) -> set[str]:
    try:
        done = subprocess.run(
            ["readelf", "-d", *map(str, files)], capture_output=True, text=True, check=False
        )
    except OSError:
        raise UserError(
            "readelf is missing; install it (Debian: apt-get install binutils)"
        ) from None
    lines = (line for line in done.stdout.splitlines() if "(NEEDED)" in line)
    return {line.rpartition("[")[2].rstrip("]") for line in lines}


def library_closure(root: Path, files: Iterable[Path]) -> set[Path]:
    """Every library of `root` that `files` need, directly or not; library files not found are
    left out (they then belong to packages that bring their own).
    """
    found: set[Path] = set()
    pending = list(files)
    while pending:
        names = _needed(pending)
        pending = []
        for name in names:
            candidates = (root / folder / name for folder in LIBRARY_FOLDERS)
            path = next((one for one in candidates if one.exists()), None)
            if path is not None and path not in found:
                found.add(path)
                pending.append(path)
    return found
