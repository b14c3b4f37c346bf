"""How the two ends of a verbs link find each other: one question and one answer over a stream
socket, JSON behind a 4-byte length, as in the handshake.

The question carries the SmartNIC's protocol version, layout hash, port and queue pair; the answer
is the host's offer and the RNIC's queue pair, or the reason for refusing. The connection then stays
open: when it ends, the RNIC's side destroys its queue pair.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

HEAD = struct.Struct("<I")
MAX_QUESTION_BYTES = 4096
MAX_ANSWER_BYTES = 256 << 20  # a tokenizer is several MB


def send_message(sock: socket.socket, message: dict[str, Any]) -> None:
    """One message."""
    body = json.dumps(message, separators=(",", ":")).encode()
    sock.sendall(HEAD.pack(len(body)) + body)


def receive_message(sock: socket.socket, max_bytes: int) -> dict[str, Any]:
    """The next message; ConnectionError when the other side has closed, ValueError for what is no
    message.
    """
    (num_bytes,) = HEAD.unpack(_receive_exactly(sock, HEAD.size))
    if num_bytes > max_bytes:
        raise ValueError(f"a message of {num_bytes} bytes is longer than {max_bytes}")
    message = json.loads(_receive_exactly(sock, num_bytes))
    if not isinstance(message, dict):
        raise ValueError("a message must be a JSON object")
    return message


def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    parts: list[bytes] = []
    while num_bytes:
        part = sock.recv(min(num_bytes, 1 << 20))
        if not part:
            raise ConnectionError("the other side closed the connection")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
