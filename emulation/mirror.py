"""This machine's own Debian mirrors, read from apt's sources."""

from __future__ import annotations

import re
from pathlib import Path

from engine.errors import UserError

SOURCES = {
    Path("/etc/apt/sources.list.d/debian.sources"): r"^URIs:\s*(\S+)",
    Path("/etc/apt/sources.list"): r"^deb\s+(?:\[.*\]\s*)?(\S+)",
}
"""Where apt's sources are, and what precedes a mirror's address in them."""


class NoMirrorError(UserError):
    """This machine has no Debian package source."""


def mirrors() -> list[str]:
    """All mirrors, the main archive's first; raises NoMirrorError where there is none."""
    for path, pattern in SOURCES.items():
        if path.is_file():
            found = re.findall(pattern, path.read_text(), re.MULTILINE)
            if found:
                return list(dict.fromkeys(found))
    raise NoMirrorError("this machine has no Debian package source to take packages from")


def mirror() -> str:
    """The main archive's mirror."""
    return mirrors()[0]
