"""Parts of the guests' image, each a folder of the cache named by a hash of what it is made of."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from emulation.vm.elf import loader_command
from engine.errors import UserError

PYTHON = "python3.11"
KEPT = 4


def content_key(parts: Iterable[bytes]) -> str:
    """A name for a part made of these bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:24]


def cached(cache: Path, name: str, key: str, build: Callable[[Path], None]) -> Path:
    """The folder `name-key`, built aside and put in place by one rename.

    Of each name the `KEPT` last used are kept.
    """
    folder = cache / f"{name}-{key}"
    if folder.exists():
        os.utime(folder)
        return folder
    partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
    try:
        build(partial)
        os.utime(partial)
        try:
            partial.rename(folder)
        except OSError:  # another process was first
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    by_use = sorted(cache.glob(f"{name}-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in by_use[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def compile_python(root: Path, folder: Path, guest_folder: str) -> None:
    """Byte code of everything below `folder`, made by the guest's own Python without chroot.

    Imports would otherwise compile it at every boot, slowly. `unchecked-hash`: time stamps in an
    initramfs are zero.
    """
    command = loader_command(root, f"usr/bin/{PYTHON}")
    command += ["-S", "-m", "compileall", "-q"]
    command += ["--invalidation-mode", "unchecked-hash", "-s", str(folder), "-p", guest_folder]
    environment = {"PYTHONHOME": str(root / "usr"), "PATH": os.environ.get("PATH", "")}
    done = subprocess.run(
        [*command, str(folder)], capture_output=True, text=True, env=environment, check=False
    )
    if not any(folder.rglob("*.pyc")):
        raise UserError(f"the guests' Python cannot be run here: {done.stderr or done.stdout}")
