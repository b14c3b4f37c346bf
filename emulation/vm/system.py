"""The system part of the image: Debian's kernel, its modules, and programs."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from emulation.vm import elf, packages
from emulation.vm.cpio import CpioWriter
from emulation.vm.kernel import unpack_kernel
from emulation.vm.modules import kernel_release, load_order
from emulation.vm.part import PYTHON, compile_python, content_key

HERE = Path(__file__).parent
RECIPE = (
    "packages.py", "cpio.py", "kernel.py", "elf.py", "modules.py", "system.py", "part.py",
)  # fmt: skip
PROGRAMS = (
    "usr/bin/busybox", "usr/sbin/ip", "usr/bin/ip", "usr/sbin/tc", "usr/bin/rdma", "usr/bin/ndctl",
    "usr/bin/python3.11", "usr/bin/ib_write_lat", "usr/bin/ib_write_bw", "usr/bin/ib_read_lat",
)  # fmt: skip
APPLETS = (
    "sh", "mount", "mkdir", "cat", "cut", "sleep", "ls", "dmesg", "insmod", "poweroff", "sync",
    "kill", "ps", "ping", "free", "head", "tail", "grep", "nc", "ln", "echo", "top",
)  # fmt: skip
# Those that nothing in this part names: a verbs provider, and what wheels are linked with.
LIBRARIES = (
    "usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav*.so",
    "usr/lib/x86_64-linux-gnu/libstdc++.so.6",
    "usr/lib/x86_64-linux-gnu/libgcc_s.so.1",
    "usr/lib/x86_64-linux-gnu/libpthread.so.0",
    "usr/lib/x86_64-linux-gnu/libdl.so.2",
    "usr/lib/x86_64-linux-gnu/librt.so.1",
    "usr/lib/x86_64-linux-gnu/libutil.so.1",
)
MODULES = (
    "virtio_pci", "virtio_net", "virtio_console", "crc32_generic", "ib_uverbs", "rdma_rxe",
    "sch_netem", "virtio_blk", "crc32c_generic", "ext4",
)  # fmt: skip
WINDOW_MODULES = ("nfit", "nd_pmem", "dax_pmem", "device_dax")
# Parts of the standard library that no process of ours imports; they are most of its size.
UNUSED_STDLIB = {
    "test", "idlelib", "lib2to3", "pydoc_data", "ensurepip", "distutils", "tkinter", "curses",
    "dbm", "sqlite3", "turtle.py", "venv", "__pycache__", "dist-packages", "unittest", "xmlrpc",
    "turtledemo",
}  # fmt: skip


def system_key() -> str:
    """Changes with the recipe only; a newer package of Debian's does not count."""
    sources = (
        "packages.py",
        "cpio.py",
        "kernel.py",
        "elf.py",
        "modules.py",
        "system.py",
        "part.py",
    )
    return content_key((HERE / name).read_bytes() for name in sources)


def build_system(cache: Path, out: Path) -> None:
    """vmlinux, part.cpio, and a root that programs may be run from."""
    root = out / "root"
    archives = packages.fetch_packages(cache / "debian")
    packages.unpack(archives, root)
    release = kernel_release(root)
    (out / "vmlinux").write_bytes(unpack_kernel(root / f"boot/vmlinuz-{release}"))
    compile_python(root, root / "usr/lib" / PYTHON, f"usr/lib/{PYTHON}")
    with (out / "part.cpio").open("wb") as file, CpioWriter(file) as archive:
        _add_system(archive, root)
    _prune(root)


def _add_system(archive: CpioWriter, root: Path) -> None:
    for name in ("dev", "proc", "sys", "run", "tmp", "root", "etc"):
        archive.add_folder(name)
    for name in packages.MERGED_FOLDERS:
        archive.add_folder(f"usr/{name}")
        archive.add_link(name, f"usr/{name}")
    programs = [root / name for name in PROGRAMS if (root / name).exists()]
    libraries = [path for pattern in LIBRARIES for path in root.glob(pattern)]
    standard = _standard_library(root)
    pyverbs = sorted((root / "usr/lib/python3/dist-packages/pyverbs").glob("*"))
    elfs = [path for path in (*programs, *libraries, *standard) if _is_program(path)]
    elfs += [path for path in pyverbs if _is_program(path)]
    closure = elf.library_closure(root, elfs)
    for path in sorted({*programs, *libraries, *standard, *closure}):
        # Libraries are links to versioned files: the contents under the name that is asked for.
        archive.add(path.resolve() if path.is_symlink() else path, str(path.relative_to(root)))
    archive.add(root / elf.LOADER, "usr/lib64/ld-linux-x86-64.so.2")
    archive.add(root / "etc/libibverbs.d/rxe.driver", "etc/libibverbs.d/rxe.driver")
    for path in pyverbs:
        if path.is_file():
            archive.add(path, str(path.relative_to(root)))
    archive.add_link("usr/bin/python3", PYTHON)
    for applet in APPLETS:
        archive.add_link(f"usr/bin/{applet}", "busybox")
    _add_modules(archive, root)


def _is_program(path: Path) -> bool:
    return path.is_file() and not path.name.endswith(".py") and elf.is_elf(path)


def _standard_library(root: Path) -> list[Path]:
    folder = root / "usr/lib" / PYTHON
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and _is_used(path.relative_to(folder), UNUSED_STDLIB)
    ]


def _is_used(path: Path, unused: set[str]) -> bool:
    parts = [part for part in path.parts if part != "__pycache__"]
    if any(part in unused or part.startswith("config-3") for part in parts):
        return False
    return not path.name.startswith(("_test", "_codecs_", "_curses", "_dbm", "_sqlite3"))


def _add_modules(archive: CpioWriter, root: Path) -> None:
    common = load_order(root, MODULES)
    window = [path for path in load_order(root, WINDOW_MODULES) if path not in common]
    for path in (*common, *window):
        archive.add(path, f"modules/{path.name}")
    archive.add_bytes("modules/order", _lines(common))
    archive.add_bytes("modules/window-order", _lines(window))


def _lines(paths: Iterable[Path]) -> bytes:
    return "".join(f"{path.name}\n" for path in paths).encode()


def _prune(root: Path) -> None:
    """Keep of the root only what later parts are compiled with."""
    shutil.rmtree(root / "var")
    for path in (root / "usr").iterdir():
        if path.name not in ("bin", "lib", "lib64", "sbin"):
            shutil.rmtree(path)
    shutil.rmtree(root / "usr/lib/modules")
    shutil.rmtree(root / "boot")
