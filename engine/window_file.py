"""A window in a file that an RNIC maps: the ports at its start, the offer at its end.

The file may be an emulated machine's memory. The RNIC reads the offer from there, so that it can
answer SmartNICs without the host (engine.link.verbs_offer).
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any

from engine.config import WindowConfig
from engine.errors import UserError
from engine.link.rnic import WATCH_S
from engine.link.verbs_offer import offer_bytes, offer_serial, withdraw_offer, write_offer


class WindowFile:
    """The file, mapped. Raises UserError where it does not do."""

    def __init__(self, config: WindowConfig) -> None:
        self.path = Path(config.file)
        try:
            fd = os.open(self.path, os.O_RDWR)
            try:
                num_bytes = config.num_bytes or os.fstat(fd).st_size - config.offset
                self._mapping = mmap.mmap(fd, num_bytes, offset=config.offset)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            raise UserError(f"the window's file {self.path} cannot be mapped: {error}") from error
        self._view = memoryview(self._mapping)

    def withdraw(self) -> None:
        """Take an offer back that is there; returns when its SmartNICs can reach nothing more."""
        if offer_serial(self._view):
            withdraw_offer(self._view)
            time.sleep(2 * WATCH_S)

    def offer(self, offer: dict[str, Any], ports_bytes: int) -> None:
        """Offer the window to SmartNICs; its ports take the first `ports_bytes`."""
        needed = ports_bytes + offer_bytes(offer)
        if needed > len(self._view):
            raise UserError(
                f"the window needs {needed >> 10} KiB for its ports and its offer, and "
                f"{self.path} has {len(self._view) >> 10} KiB; make that larger, or lower "
                "--ring-slots, --num-ports, --token-ring-entries or --max-context"
            )
        write_offer(self._view, offer)

    def close(self) -> None:
        """Unmap."""
        self._view.release()
        self._mapping.close()
