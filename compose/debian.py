"""Debian packages for this machine: installed when we may, or one sentence that says what to do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from compose.command import run
from compose.paths import TOOLS
from emulation.mirror import mirror
from engine.errors import UserError


class PackagesError(UserError):
    """Packages are missing and cannot be installed from here."""


def can_install() -> bool:
    """Whether apt-get may be used: it is there, and we are root."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(packages: Sequence[str], *, purpose: str) -> None:
    """Install packages; raises PackagesError when this is not Debian or we are not root."""
    if not can_install():
        raise PackagesError(
            f"{purpose} needs {' '.join(packages)}: install that "
            f"(Debian: apt-get install {' '.join(packages)}), or run this as root on Debian"
        )
    run(["apt-get", "update", "-qq"], what="updating Debian's package lists")
    run(
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages],
        what=f"installing {' '.join(packages)}",
        environment={"DEBIAN_FRONTEND": "noninteractive"},
    )


def keyring() -> Path:
    """The keys that Debian's archive is signed with."""
    path = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    if not path.is_file():
        install(["debian-archive-keyring"], purpose="checking Debian's signatures")
    return path


def download(package: str, release: str, folder: Path) -> Path:
    """A package's file of another Debian release, from this machine's mirror, signature checked.

    Nothing is installed, and this machine's own package lists stay as they are.
    """
    scratch = TOOLS / "apt" / release
    for name in ("lists/partial", "cache/archives/partial", "etc"):
        (scratch / name).mkdir(parents=True, exist_ok=True)
    source = f"deb [signed-by={keyring()}] {mirror()} {release} main\n"
    (scratch / "etc" / "sources.list").write_text(source)
    options = [
        f"Dir::Etc::sourcelist={scratch}/etc/sources.list",
        "Dir::Etc::sourceparts=/dev/null",
        f"Dir::State::lists={scratch}/lists",
        f"Dir::Cache={scratch}/cache",
        "APT::Sandbox::User=root",
    ]
    words = [word for option in options for word in ("-o", option)]
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{package}_*.deb"):
        old.unlink()
    run(["apt-get", *words, "update", "-qq"], what=f"reading Debian {release}'s package lists")
    run(
        ["apt-get", *words, "download", "-qq", package],
        what=f"downloading {package} of Debian {release}",
        folder=folder,
    )
    return next(folder.glob(f"{package}_*.deb"))
