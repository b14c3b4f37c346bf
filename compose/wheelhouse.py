"""What images are built from, gathered where there is a network: builds then need none.

``compose/.wheelhouse`` has Python wheels and a requirements file for each image, Debian packages
for each image, and the default model. Each part is gathered again only when what it is made of
has changed.
"""

from __future__ import annotations

import filecmp
import functools
import hashlib
import json
import platform
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from compose.base_image import base_tag
from compose.command import run
from compose.docker import docker
from compose.paths import REPOSITORY, WHEELHOUSE
from emulation.vm.image import build_image
from engine.model.fetch import fetch_default_model

IMAGE_PYTHON = "3.11"  # of the base image's Debian release
MANYLINUX = (
    *(f"manylinux_2_{minor}" for minor in range(36, 4, -1)),
    *("manylinux2014", "manylinux2010", "manylinux1"),
)
"""Wheels that the base image's C library (2.36) can run."""
HOST_ONLY = ("torch", "gguf", "safetensors")  # the SmartNIC never sees the model's weights
LOAD_ONLY = ("locust",)
DEBIAN = {
    "common": (
        "python3-venv",
        "g++",
        "iproute2",
        "ibverbs-providers",
        "python3-pyverbs",
    ),
    "machine": ("qemu-system-x86",),
}
DOWNLOAD_TIMEOUT_S = 1800.0


def requirements() -> dict[str, list[str]]:
    """Python packages of each image, by the project's own lists."""
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    all_of = list(project["project"]["dependencies"])
    develop = project["project"]["optional-dependencies"]["dev"]
    return {
        "build": list(project["build-system"]["requires"]),
        "smartnic": [line for line in all_of if _name(line) not in HOST_ONLY],
        "gpu": [line for line in all_of if _name(line) in HOST_ONLY],
        "load": [line for line in develop if _name(line) in LOAD_ONLY],
    }


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return found[0].lower()


def gather(say: Callable[[str], None]) -> None:
    """Gather all parts; raises CommandError. The base image must be there."""
    _part("wheels", requirements(), _gather_wheels, say)
    for name, packages in DEBIAN.items():
        gather_into = functools.partial(_gather_debs, packages=packages)
        _part(f"debs/{name}", [base_tag(), *packages], gather_into, say)
    model = WHEELHOUSE / "model"
    model.mkdir(parents=True, exist_ok=True)
    fetch_default_model(model)
    _gather_guest(say)


def _gather_guest(say: Callable[[str], None]) -> None:
    """The emulated machines' kernel, system and Python packages."""
    say("gathering the emulated machines' image")
    image = build_image()
    folder = WHEELHOUSE / "guest"
    folder.mkdir(parents=True, exist_ok=True)
    for path in (image.kernel, image.initramfs, image.packages):
        target = folder / path.name
        if not target.exists() or not filecmp.cmp(path, target):
            shutil.copy2(path, target)


def _part(
    name: str, made_of: object, gather_into: Callable[[Path], None], say: Callable[[str], None]
) -> None:
    folder = WHEELHOUSE / name
    key = hashlib.sha256(json.dumps([platform.machine(), made_of]).encode()).hexdigest()
    stamp = folder.with_name(f".{folder.name}.made-of")
    if folder.is_dir() and stamp.is_file() and stamp.read_text() == key:
        return
    say(f"gathering {name}")
    stamp.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    gather_into(folder)
    stamp.write_text(key)


def _gather_wheels(folder: Path) -> None:
    lists = requirements()
    for image, lines in lists.items():
        (folder / f"{image}.txt").write_text("".join(f"{line}\n" for line in lines))
    every: Sequence[str] = sorted({line for lines in lists.values() for line in lines})
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    words += ["--disable-pip-version-check", "--only-binary", ":all:"]
    words += ["--implementation", "cp", "--python-version", IMAGE_PYTHON]
    for tag in MANYLINUX:
        words += ["--platform", f"{tag}_{platform.machine()}"]
    words += ["--dest", str(folder), *every]
    run(words, what="gathering Python packages", timeout_s=DOWNLOAD_TIMEOUT_S)


def _gather_debs(folder: Path, packages: Sequence[str]) -> None:
    """Download packages and what they need beyond the base image, in a container of it."""
    script = (
        "apt-get update -qq && apt-get install -qq -y --no-install-recommends --download-only "
        f"-o Dir::Cache::archives=/debs -o APT::Sandbox::User=root {' '.join(packages)} "
        "&& rm -rf /debs/partial /debs/lock"
    )
    docker(
        *("run", "--rm", "--network", "host", "--volume", f"{folder}:/debs"),
        *("--label", "blinkbed.stack=wheelhouse", base_tag(), "sh", "-c", script),
        what="gathering Debian packages",
        timeout_s=DOWNLOAD_TIMEOUT_S,
    )
