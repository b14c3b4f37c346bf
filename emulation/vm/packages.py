"""Debian packages unpacked into a folder: where the guests' kernel and programs come from.

Nothing is installed on the host: apt resolves and fetches against an empty package database of its
own, and the archives are only unpacked. The host's own sources and proxies are used.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from emulation.mirror import mirrors
from engine.errors import UserError

PACKAGES = (
    "linux-image-amd64",
    "busybox-static",
    "e2fsprogs",
    "kmod",
    "libstdc++6",
    "iproute2",
    "ndctl",
    "rdma-core",
    "ibverbs-providers",
    "perftest",
    "python3-minimal",
    "python3-pyverbs",
)
SUITE = "bookworm"
MERGED_FOLDERS = ("bin", "sbin", "lib", "lib64")
FETCH_TIMEOUT_S = 600.0


def _run(command: Sequence[str], what: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{what} took longer than {FETCH_TIMEOUT_S:g} s; try again") from None
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise UserError(f"{what} failed: {lines[-1] if lines else command[0]}")


def _sources() -> str:
    """Lines of sources.list: the suite and its security updates, from the machine's mirrors."""
    suites = {False: SUITE, True: f"{SUITE}-security"}
    return "".join(f"deb {one} {suites['security' in one]} main\n" for one in mirrors())


def fetch_packages(folder: Path, packages: Sequence[str] = PACKAGES) -> list[Path]:
    """The archives of `packages` and all that they depend on, in `folder`.

    Raises UserError without apt or when Debian's archive cannot be reached.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise UserError(
                f"{tool} is needed to make the guests' image and is not here; build the image on "
                "a Debian or Ubuntu machine (or in a debian container) and copy the cache folder"
            )
    state, archives = folder / "state", folder / "archives"
    (state / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    sources = folder / "sources.list"
    sources.write_text(_sources())
    options = {
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Cache": folder,
        "Dir::Cache::archives": archives,
        "APT::Architecture": "amd64",
        "APT::Architectures": "amd64",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "true",
    }
    apt = ["apt-get", "-q", "-y"]
    for key, value in options.items():
        apt += ["-o", f"{key}={value}"]
    _run([*apt, "update"], "reading Debian's package lists (apt-get update)")
    _run([*apt, "install", "--download-only", *packages], "fetching the guests' packages")
    return sorted(archives.glob("*.deb"))


def unpack(archives: Sequence[Path], root: Path) -> None:
    """Unpack every archive into `root`, a file system with merged /usr."""
    for name in MERGED_FOLDERS:
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        link = root / name
        if not link.is_symlink():
            link.symlink_to(f"usr/{name}")
    for archive in archives:
        # tar, not dpkg-deb -x: that one would replace the links by folders.
        with subprocess.Popen(
            ["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE
        ) as source:
            command = ["tar", "-x", "-C", str(root), "--keep-directory-symlink", "--no-same-owner"]
            done = subprocess.run(command, stdin=source.stdout, check=False)
        if done.returncode or source.returncode:
            raise UserError(f"{archive.name} cannot be unpacked; delete {archive.parent} and retry")
