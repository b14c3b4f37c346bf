"""Archives for the kernel's initramfs (Documentation/driver-api/early-userspace/buffer-format)."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import BinaryIO

END_PADDING = 512  # so that archives may be joined end to end


class CpioWriter:
    """Writes one "newc" archive: everything owned by root, times zero, so equal trees give equal
    bytes. A context manager that ends the archive.
    """

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._inode = 0
        self._folders: set[str] = set()

    def add_tree(self, folder: Path, prefix: str = "") -> None:
        """Everything below `folder`, under `prefix` (a path without a leading slash)."""
        for path in sorted(folder.rglob("*")):
            self.add(path, f"{prefix}/{path.relative_to(folder)}".lstrip("/"))

    def add(self, path: Path, name: str) -> None:
        """One file, symbolic link or folder as `name`; missing parent folders are made."""
        self._add_parents(name)
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            self._entry(name, status.st_mode, str(path.readlink()).encode())
        elif stat.S_ISREG(status.st_mode):
            self._entry(name, status.st_mode, path.read_bytes())
        elif stat.S_ISDIR(status.st_mode):
            self._add_folder(name)

    def add_bytes(self, name: str, data: bytes, mode: int = 0o644) -> None:
        """A file that is nowhere on disk."""
        self._add_parents(name)
        self._entry(name, stat.S_IFREG | mode, data)

    def add_link(self, name: str, target: str) -> None:
        """A symbolic link."""
        self._add_parents(name)
        self._entry(name, stat.S_IFLNK | 0o777, target.encode())

    def add_folder(self, name: str) -> None:
        """An empty folder."""
        self._add_parents(name)
        self._add_folder(name)

    def _add_parents(self, name: str) -> None:
        parts = name.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            self._add_folder("/".join(parts[:depth]))

    def _add_folder(self, name: str) -> None:
        if name not in self._folders:
            self._folders.add(name)
            self._entry(name, stat.S_IFDIR | 0o755, b"")

    def _entry(self, name: str, mode: int, data: bytes) -> None:
        self._inode += 1
        encoded = name.encode() + b"\0"
        fields = (self._inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
        self._out.write(head + bytes(-len(head) % 4))
        self._out.write(data)
        self._out.write(bytes(-len(data) % 4))

    def __enter__(self) -> CpioWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self._entry("TRAILER!!!", 0, b"")
        self._out.write(bytes(END_PADDING))
