"""Frames between a client and its device process, over a Unix SOCK_SEQPACKET socket.

A request is the pickle of ``(request id, name, arguments)``; id 0 wants no reply. A reply is
``id: u64, status: u32`` and a body: nothing (DONE), the device's error text (DEVICE_ERROR), or a
pickle (RESULT, RAISED). A reply with id 0 tells every client why the device is about to end.
Requests larger than INLINE_BYTES travel in a memfd beside an empty frame.
Both ends are processes of one user on one machine (the device checks), hence pickle.
"""

from __future__ import annotations

import array
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

VERSION = 1
INLINE_BYTES = 64 * 1024
MAX_FDS = 64

REPLY = struct.Struct("<QI")
DONE, DEVICE_ERROR, RESULT, RAISED = range(4)

_LARGE = b"\0"  # no pickle starts with this byte


def send_request(sock: socket.socket, request: tuple[int, str, tuple[Any, ...]]) -> None:
    payload = pickle.dumps(request, protocol=5)
    if len(payload) <= INLINE_BYTES:
        sock.sendall(payload)
        return
    fd = os.memfd_create("cupysim-request", os.MFD_CLOEXEC)
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(payload)
        socket.send_fds(sock, [_LARGE], [fd])
    finally:
        os.close(fd)


class RequestReader:
    """Reads requests of one connection into one buffer of its own."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray(INLINE_BYTES)
        self._view = memoryview(self._buffer)
        self._ancillary = socket.CMSG_SPACE(array.array("i").itemsize)

    def read(self) -> tuple[int, str, tuple[Any, ...]] | None:
        """The next request, or None at the end of the connection."""
        length, ancillary, _, _ = self._sock.recvmsg_into([self._view], self._ancillary)
        if length == 0:
            return None
        if ancillary:
            fds = array.array("i")
            fds.frombytes(ancillary[0][2])
            with os.fdopen(fds[0], "rb") as file:
                file.seek(0)
                return _checked(pickle.load(file))
        return _checked(pickle.loads(self._view[:length]))


def _checked(request: Any) -> tuple[int, str, tuple[Any, ...]]:
    request_id, name, arguments = request
    return int(request_id), str(name), tuple(arguments)


def send_reply(
    sock: socket.socket, request_id: int, status: int, body: object, fds: Sequence[int] = ()
) -> None:
    frame = REPLY.pack(request_id, status) + pickle.dumps(body, protocol=5)
    if fds:
        socket.send_fds(sock, [frame], list(fds))
    else:
        sock.sendall(frame)


def read_reply(sock: socket.socket) -> tuple[int, int, bytes, list[int]] | None:
    """(request id, status, body, file descriptors), or None at the end of the connection."""
    frame, fds, _, _ = socket.recv_fds(sock, 1 << 20, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    if not frame:
        return None
    request_id, status = REPLY.unpack_from(frame)
    return request_id, status, frame[REPLY.size :], fds
