"""The client's connection to its device process: made at first use, one per process.

The device is the one that listens at `$CUPYSIM_DEVICE`; without that variable a private one is
started, which ends with this process (`CUPYSIM_KEEP_DEVICE=1`: it stays). Requests without a reply
are ordered with all others of the process, whichever thread makes them.
"""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from emulation.cupysim import errors, wire
from emulation.cupysim.errors import CUDARuntimeError
from emulation.cupysim.region import Region, RegionTable

CONNECT_TIMEOUT_S = 10.0
START_TIMEOUT_S = 120.0  # of a private device: it may have to compile the executor first


class Client:
    """A connected client. All methods may be called from any thread."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._sock = sock
        self._process = process
        self._ids = count(1)
        self._send_lock = threading.Lock()
        self._garbage: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._arrived = threading.Condition()
        self._reading = False
        self._replies: dict[int, tuple[int, bytes, list[int]]] = {}
        self._error = ""  # the device's sticky error, once it is known
        self.closed = False
        self.regions = RegionTable()
        (self.device_pid, self._error, regions), fds = self.request_with_fds("hello", wire.VERSION)
        for (base, nbytes, offset), fd in zip(regions, fds, strict=True):
            self.regions.add(Region(fd, nbytes, base=base, offset=offset))

    # ---- requests -------------------------------------------------------------------------

    def request(self, name: str, *arguments: Any) -> Any:
        """Sends and waits for the reply; raises what the device process raised."""
        return self.request_with_fds(name, *arguments)[0]

    def request_with_fds(self, name: str, *arguments: Any) -> tuple[Any, list[int]]:
        request_id = next(self._ids)
        self._send((request_id, name, arguments))
        status, body, fds = self._wait(request_id)
        if status == wire.DONE:
            return None, fds
        if status == wire.DEVICE_ERROR:
            self._error = body.decode(errors="replace")
            self._raise_sticky()
        result = pickle.loads(body)
        if status == wire.RAISED:
            if isinstance(result, CUDARuntimeError) and result.status == errors.LAUNCH_FAILURE:
                self._error = result.detail
            raise result
        return result, fds

    def post(self, name: str, *arguments: Any) -> None:
        """Sends without waiting; a failure becomes the device's sticky error."""
        if self._error:
            self._raise_sticky()
        self._send((0, name, arguments))

    def discard(self, name: str, *arguments: Any) -> None:
        """For finalizers: sent before the next request. They may run inside a send, and at exit
        they must not end anything: a device goes on without its client."""
        if not self.closed:
            self._garbage.append((name, arguments))

    def _send(self, request: tuple[int, str, tuple[Any, ...]]) -> None:
        if self.closed:
            raise CUDARuntimeError(errors.DEVICE_UNAVAILABLE, "the connection was closed")
        try:
            with self._send_lock:
                while self._garbage:
                    wire.send_request(self._sock, (0, *self._garbage.popleft()))
                wire.send_request(self._sock, request)
        except (BrokenPipeError, ConnectionResetError):
            self._raise_lost()

    # ---- replies: one waiting thread reads for all ------------------------------------------

    def _wait(self, request_id: int) -> tuple[int, bytes, list[int]]:
        while True:
            with self._arrived:
                while request_id not in self._replies and self._reading:
                    self._arrived.wait()
                if request_id in self._replies:
                    return self._replies.pop(request_id)
                self._reading = True
            reply = None
            try:
                reply = wire.read_reply(self._sock)
            except ConnectionResetError:
                pass
            finally:
                with self._arrived:
                    if reply is not None:
                        self._take(reply)
                    self._reading = False
                    self._arrived.notify_all()
            if reply is None:
                self._raise_lost()

    def _take(self, reply: tuple[int, int, bytes, list[int]]) -> None:
        request_id, status, body, fds = reply
        if request_id == 0:  # the device's farewell
            self._error = body.decode(errors="replace")
        else:
            self._replies[request_id] = (status, body, fds)

    def _raise_sticky(self) -> NoReturn:
        raise CUDARuntimeError(errors.LAUNCH_FAILURE, self._error)

    def _raise_lost(self) -> NoReturn:
        """The device process has ended; says how, as far as it is known here."""
        self._read_farewell()
        if self._error:
            self._raise_sticky()
        text = f"the device process {getattr(self, 'device_pid', '')} has ended"
        if self._process is not None:
            try:
                status = self._process.wait(timeout=1.0)
                text += f" by signal {-status}" if status < 0 else f" with exit status {status}"
            except subprocess.TimeoutExpired:
                pass
        raise CUDARuntimeError(errors.DEVICE_UNAVAILABLE, text)

    def _read_farewell(self) -> None:
        """Replies may still be queued in a connection that the other end has closed."""
        with self._arrived:
            while True:
                try:
                    reply = wire.read_reply(self._sock)
                except ConnectionResetError:
                    continue  # reported once, before what is queued
                except OSError:
                    return
                if reply is None:
                    return
                self._take(reply)

    # ---- end ------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Ends the device process, whatever it runs."""
        try:
            self.request("shutdown")
        except CUDARuntimeError as error:
            if error.status != errors.DEVICE_UNAVAILABLE:
                raise
        self.close()

    def close(self) -> None:
        """Leaves the device process to itself. Idempotent."""
        if not self.closed:
            self.closed = True
            self._sock.close()


_client: Client | None = None
_client_lock = threading.Lock()


def current() -> Client:
    """This process's client, connected (and a private device started) at the first call."""
    global _client
    if _client is None:
        with _client_lock:
            if _client is None:
                _client = _connect()
    return _client


def connected() -> Client | None:
    return _client


def disconnect() -> None:
    """Forgets the connection; the next use makes another."""
    global _client
    with _client_lock:
        if _client is not None:
            _client.close()
        _client = None


def _connect() -> Client:
    configured = os.environ.get("CUPYSIM_DEVICE")
    return _connect_to(Path(configured)) if configured else _start_private()


def _connect_to(path: Path) -> Client:
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(str(path))
            return Client(sock)
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            if time.monotonic() > deadline:
                raise CUDARuntimeError(
                    errors.DEVICE_UNAVAILABLE,
                    f"no device process listens at CUPYSIM_DEVICE={path}; start one with "
                    f"'python -m emulation.cupysim.device --socket {path}'",
                ) from None
            time.sleep(0.02)


def _start_private() -> Client:
    folder = Path(tempfile.mkdtemp(prefix="cupysim-"))
    path = folder / "device"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()
    command = [sys.executable, "-m", "emulation.cupysim.device", "--socket", str(path)]
    command += ["--listen-fd", str(listener.fileno())]
    keep = os.environ.get("CUPYSIM_KEEP_DEVICE") == "1"
    if not keep:
        command += ["--exit-with", str(os.getpid())]
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    process = subprocess.Popen(
        command,
        pass_fds=[listener.fileno()],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=keep,
    )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listener:
        sock.connect(str(path))
    return Client(sock, process)


@atexit.register
def _at_exit() -> None:
    if _client is not None:
        _client.closed = True  # finalizers that run later have nothing to say


def _after_fork() -> None:
    global _client
    if _client is not None:
        _client.closed = True
    _client = None


os.register_at_fork(after_in_child=_after_fork)
