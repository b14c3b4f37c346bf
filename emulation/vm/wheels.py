"""The guests' Python packages: wheels on a read-only disk."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

from emulation.vm.elf import loader_command
from emulation.vm.part import PYTHON, compile_python, content_key
from engine.errors import UserError

WHEELS = (
    "numpy", "uvicorn", "h11", "click", "httptools", "uvloop", "jinja2", "markupsafe",
    "prometheus-client", "tokenizers", "starlette", "anyio", "idna", "typing-extensions", "regex",
)  # fmt: skip
UNUSED_IN_WHEELS = {"tests", "test", "testing", "f2py", "distutils", "__pycache__", "include"}
NEEDED_IN_WHEELS = {"numpy/testing"}


def wheels_key() -> str:
    """Changes with the versions that this interpreter runs."""
    return content_key([*(_pin(name).encode() for name in WHEELS), Path(__file__).read_bytes()])


def _pin(name: str) -> str:
    try:
        return f"{name}=={importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return name


def build_wheels(system: Path, out: Path) -> None:
    """packages.ext4, a disk of just these packages, byte-compiled."""
    target = out / "site-packages"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--target", str(target), "--no-deps", "--only-binary=:all:", "--no-compile"]
    command += ["--python-version", PYTHON.removeprefix("python"), "--implementation", "cp"]
    command += ["--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64"]
    done = subprocess.run(
        [*command, *map(_pin, WHEELS)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise UserError(f"fetching the guests' Python packages failed: {done.stderr.strip()}")
    for path in sorted(target.rglob("*")):
        relative = str(path.relative_to(target))
        if path.is_dir() and path.name in UNUSED_IN_WHEELS and relative not in NEEDED_IN_WHEELS:
            shutil.rmtree(path)
    compile_python(system / "root", target, "opt/site-packages")
    _make_disk(system / "root", target, out / "packages.ext4")
    shutil.rmtree(target)


def _make_disk(root: Path, tree: Path, disk: Path) -> None:
    num_bytes = sum(path.lstat().st_size + 4096 for path in tree.rglob("*"))
    num_blocks = num_bytes // 4096 * 5 // 4 + 1024
    command = loader_command(root, "usr/sbin/mke2fs")
    command += ["-q", "-t", "ext4", "-O", "^has_journal", "-b", "4096", "-m", "0"]
    command += ["-E", "root_owner=0:0", "-d", str(tree), str(disk), str(num_blocks)]
    configuration = {"MKE2FS_CONFIG": str(root / "etc/mke2fs.conf"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=configuration, check=False)
    if done.returncode != 0:
        raise UserError(f"making the disk {disk} failed: {done.stderr.strip()}")
