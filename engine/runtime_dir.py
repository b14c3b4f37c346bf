"""The private folder of one stack: sockets and logs, gone when the launcher ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

PREFIX = "blinkbed-"
LOCK_NAME = "launcher.lock"
STALE_AGE_S = 60.0  # a younger folder may be one whose launcher has not locked it yet


class RuntimeDir:
    """Makes a new folder under the system's temporary folder and removes it at ``close``.

    The launcher holds a lock on a file inside. A folder whose lock is free belongs to a launcher
    that was killed; the next one to start removes it.
    """

    def __init__(self, base: Path | None = None) -> None:
        self._base = Path(tempfile.gettempdir()) if base is None else base
        self._sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._base))
        self._lock = os.open(self.path / LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._closed = False

    def _sweep(self) -> None:
        for lock_path in self._base.glob(f"{PREFIX}*/{LOCK_NAME}"):
            try:
                lock = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_ours_and_old(os.fstat(lock)):
                    shutil.rmtree(lock_path.parent, ignore_errors=True)
            except OSError:
                pass
            finally:
                os.close(lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder; idempotent."""
        if not self._closed:
            self._closed = True
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)


def _is_ours_and_old(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > STALE_AGE_S
