"""The device process's connections: one per client process, any number of them.

Requests without a reply are as asynchronous as a GPU's: what goes wrong in one is found later, as
the device's sticky error. Work that was enqueued goes on when its client is gone.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from emulation.cupysim import wire
from emulation.cupysim.executor import Executor
from emulation.cupysim.requests import DEFERRED, Requests, WithFds

EXIT_FAILED = 70  # a graph failed: the supervisor must start a new device
DRAIN_MS = 1000  # for replies that tell clients why


class Server:
    """Serves one device until the process ends."""

    def __init__(self, memory_bytes: int, at_exit: Callable[[], None]) -> None:
        self._at_exit = at_exit
        self._executor = Executor()
        self._requests = Requests(self._executor, memory_bytes, self.end)
        self._connections: set[socket.socket] = set()
        threading.Thread(target=self._end_when_fatal, daemon=True).start()

    # ---- life -----------------------------------------------------------------------------

    def _end_when_fatal(self) -> None:
        self._executor.wait_fatal()
        self._executor.wait(self._requests.native_streams(), DRAIN_MS)
        farewell = wire.REPLY.pack(0, wire.DEVICE_ERROR) + self._executor.error_text().encode()
        for connection in list(self._connections):
            try:
                connection.send(farewell, socket.MSG_DONTWAIT)
            except OSError:
                pass  # that client is gone, or frozen with a full queue
        print("cupysim device: a graph failed, the device process ends", file=sys.stderr)
        self.end(EXIT_FAILED)

    def end(self, status: int) -> NoReturn:
        """Ends the process at once: a running chain has no other end."""
        self._at_exit()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    # ---- connections ----------------------------------------------------------------------

    def serve(self, listener: socket.socket) -> NoReturn:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()

    def _serve_one(self, connection: socket.socket) -> None:
        with connection:
            if not _same_user(connection):
                return
            reader = wire.RequestReader(connection)
            self._connections.add(connection)
            try:
                while (request := reader.read()) is not None:
                    self._handle(connection, *request)
            except (ConnectionError, OSError):
                return  # the client was killed
            finally:
                self._connections.discard(connection)

    def _handle(
        self, connection: socket.socket, request_id: int, name: str, arguments: tuple[Any, ...]
    ) -> None:
        if request_id == 0:
            try:
                self._requests.post(name, arguments)
            except Exception as error:
                traceback.print_exc()
                self._executor.fail(f"{name} failed: {error}".encode())
            return
        result: Any
        fds: Sequence[int] = ()
        try:
            if name in DEFERRED:
                self._requests.answer(name, (connection, request_id, *arguments))
                return
            result = self._requests.answer(name, arguments)
        except Exception as error:
            wire.send_reply(connection, request_id, wire.RAISED, _portable(error))
            return
        if isinstance(result, WithFds):
            result, fds = result
        wire.send_reply(connection, request_id, wire.RESULT, result, fds)


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, _ = struct.unpack("iII", credentials)
    return uid in (0, os.getuid())


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
