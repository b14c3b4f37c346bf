"""The guests' image: one kernel and one initramfs per role, made once and cached by content.

The initramfs is two archives end to end: the system (Debian packages) and Blinkbed itself. Python
packages (wheels, pinned to the versions that this interpreter runs) are a read-only disk, of which
only what is used gets read. Each part is cached under a hash of what it is made of, so that a
change of our own sources costs a second and no download.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from emulation.vm.application import application_key, build_application
from emulation.vm.part import cached
from emulation.vm.system import build_system, system_key
from emulation.vm.wheels import build_wheels, wheels_key
from engine import native


@dataclass(frozen=True, slots=True)
class Image:
    """Paths of the finished files."""

    kernel: Path
    initramfs: Path
    packages: Path
    """ext4, read only: the guests' /opt/site-packages."""


def build_image() -> Image:
    """The image for both roles, from the cache where nothing has changed.

    The first time takes a minute and fetches about 150 MB from Debian's archive and PyPI.
    """
    cache = native.cache_dir() / "vm"
    cache.mkdir(parents=True, exist_ok=True)
    system = cached(cache, "system", system_key(), lambda path: build_system(cache, path))
    wheels = cached(cache, "wheels", wheels_key(), lambda path: build_wheels(system, path))
    application = cached(
        cache, "app", application_key(), lambda path: build_application(system, path)
    )
    both = hashlib.sha256(f"{system.name}{application.name}".encode()).hexdigest()[:24]
    initramfs = cached(cache, "init", both, lambda path: _join((system, application), path))
    return Image(system / "vmlinux", initramfs / "initramfs", wheels / "packages.ext4")


def _join(parts: Iterable[Path], out: Path) -> None:
    with (out / "initramfs").open("wb") as file:
        for part in parts:
            with (part / "part.cpio").open("rb") as source:
                shutil.copyfileobj(source, file, 1 << 20)
