"""Blinkbed itself in the image: the engine's sources, its native library, and the agent."""

from __future__ import annotations

import shutil
from pathlib import Path

from emulation.vm.cpio import CpioWriter
from emulation.vm.part import compile_python, content_key
from engine import native
from engine.ring_library import CSRC

HERE = Path(__file__).parent
PROJECT = HERE.parent.parent
GUEST_MACHINE = "-march=x86-64-v2"
PREBUILT = "engine/prebuilt"
"""Where libraries lie that a machine without a compiler loads."""


def _application_files() -> list[tuple[Path, str]]:
    engine = PROJECT / "engine"
    files = [
        (path, f"opt/blinkbed/{path.relative_to(PROJECT)}")
        for path in sorted(engine.rglob("*"))
        if path.suffix in (".py", ".json", ".jinja") and path.is_file()
    ]
    guest = HERE / "guest"
    for name in ("agent.py", "attack.py"):
        files.append((guest / name, f"opt/blinkbed/{name}"))
    files.append((guest / "init", "init"))
    return files


def application_key() -> str:
    """Changes with any source that goes in."""
    sources = [path.read_bytes() for path, _ in _application_files()]
    sources += [path.read_bytes() for path in sorted(CSRC.iterdir())]
    return content_key([*sources, Path(__file__).read_bytes()])


def build_application(system: Path, out: Path) -> None:
    """part.cpio."""
    tree = out / "tree"
    for path, name in _application_files():
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    (tree / "init").chmod(0o755)
    library = native.build_library(
        [CSRC / "client.cpp"],
        include_dirs=[CSRC],
        extra_flags=[GUEST_MACHINE, "-static-libstdc++", "-static-libgcc"],
        name="ring-client-guest",
    )
    prebuilt = tree / "opt/blinkbed" / PREBUILT
    prebuilt.mkdir(parents=True)
    shutil.copy(library, prebuilt / "ring-client.so")
    compile_python(system / "root", tree / "opt/blinkbed", "opt/blinkbed")
    with (out / "part.cpio").open("wb") as file, CpioWriter(file) as archive:
        archive.add_tree(tree)
    shutil.rmtree(tree)
