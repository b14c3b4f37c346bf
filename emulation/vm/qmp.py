"""QEMU's control socket (QMP), as far as it is used here."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

TIMEOUT_S = 10.0


class QmpError(Exception):
    """QEMU refused a command, or did not answer."""


class QmpClient:
    """One connection; `execute` may be called from any thread. `close` is idempotent."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(TIMEOUT_S)
        self._socket.connect(str(path))
        self._file = self._socket.makefile("rb")
        self._read()  # the greeting
        self.execute("qmp_capabilities")

    def _read(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            raise QmpError("QEMU has ended")
        message: dict[str, Any] = json.loads(line)
        return message

    def execute(self, command: str, **arguments: Any) -> Any:
        """The command's return value; raises QmpError."""
        request: dict[str, Any] = {"execute": command}
        if arguments:
            request["arguments"] = arguments
        with self._lock:
            try:
                self._socket.sendall(json.dumps(request).encode() + b"\n")
                while True:
                    message = self._read()
                    if "return" in message:
                        return message["return"]
                    if "error" in message:
                        raise QmpError(f"{command}: {message['error']['desc']}")
            except OSError as error:
                raise QmpError(f"{command}: no answer from QEMU: {error}") from error

    def close(self) -> None:
        self._file.close()
        self._socket.close()
