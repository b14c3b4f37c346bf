"""The handshake: how a SmartNIC learns where its port is and what is served there.

Over a stream socket, once per SmartNIC and start: the SmartNIC says which protocol and layout it
was built with and which port it wants; the host answers with epoch, geometry, model card and the
way to the memory, or with the reason for refusing. On the shared-memory link the way is a file
descriptor (SCM_RIGHTS over a Unix socket). Messages are JSON behind a 4-byte length.

After the handshake the host takes no part in serving.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import protocol
from engine.errors import UserError
from engine.link import Link
from engine.link.shm import SharedMemoryLink
from engine.model.card import TokenizerCard
from engine.protocol import Geometry

MAX_HELLO_BYTES = 4096
MAX_ANSWER_BYTES = 256 << 20  # a tokenizer is several MB
PEER_TIMEOUT_S = 10.0


class HandshakeRefusedError(UserError):
    """The two sides do not fit, or the host is not there; the message says which."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the SmartNIC must know of the model; it never sees the model's files."""

    model_id: str
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    tokenizer: TokenizerCard

    def to_mapping(self) -> dict[str, Any]:
        """As JSON data, for the answer."""
        return dataclasses.asdict(self)

    @classmethod
    def from_mapping(cls, fields: dict[str, Any]) -> ModelCard:
        """The inverse of to_mapping."""
        tokenizer = TokenizerCard.from_json(json.dumps(fields["tokenizer"]))
        return cls(**{**fields, "eos_ids": tuple(fields["eos_ids"]), "tokenizer": tokenizer})


@dataclass(frozen=True, slots=True)
class Offer:
    """The host's side of a window: everything that an answer is made of."""

    window_fd: int
    """-1: there is no file, but a handle."""
    window_offset: int
    """Where in that file the window begins, bytes."""
    geometry: Geometry
    num_ports: int
    epoch: int
    window: str
    """Where the window lives, in words (for example "simulated device memory")."""
    card: ModelCard
    server_info: dict[str, Any]
    window_handle: str = ""
    """Of the GPU memory that holds the window (CUDA IPC), in hex; empty: a file holds it."""

    def to_mapping(self) -> dict[str, Any]:
        """As JSON data: all but the descriptor."""
        return {
            "version": protocol.VERSION,
            "layout_hash": protocol.layout_hash(),
            "geometry": dataclasses.asdict(self.geometry),
            "port_bytes": self.geometry.port_bytes,
            "num_ports": self.num_ports,
            "epoch": self.epoch,
            "window": self.window,
            "window_offset": self.window_offset,
            "window_handle": self.window_handle,
            "card": self.card.to_mapping(),
            "server_info": self.server_info,
        }

    @classmethod
    def from_mapping(cls, fields: dict[str, Any], window_fd: int) -> Offer:
        """The inverse of to_mapping."""
        return cls(
            window_fd=window_fd,
            window_offset=fields["window_offset"],
            geometry=Geometry(**fields["geometry"]),
            num_ports=fields["num_ports"],
            epoch=fields["epoch"],
            window=fields["window"],
            window_handle=fields["window_handle"],
            card=ModelCard.from_mapping(fields["card"]),
            server_info=fields["server_info"],
        )


@dataclass(frozen=True, slots=True)
class Session:
    """The SmartNIC's side: a link to its port, and what is served behind it."""

    link: Link
    card: ModelCard
    server_info: dict[str, Any]


def _send(sock: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
    body = json.dumps(message).encode()
    socket.send_fds(sock, [struct.pack("<I", len(body))], fds)
    sock.sendall(body)


def _receive_exactly(sock: socket.socket, nbytes: int) -> bytes:
    parts: list[bytes] = []
    while nbytes:
        part = sock.recv(min(nbytes, 1 << 20))
        if not part:
            raise ConnectionError("the other side closed the connection")
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


def _receive(sock: socket.socket, max_bytes: int) -> tuple[dict[str, Any], list[int]]:
    head, fds, _, _ = socket.recv_fds(sock, 4, 4)
    if len(head) < 4:
        head += _receive_exactly(sock, 4 - len(head))
    (nbytes,) = struct.unpack("<I", head)
    if nbytes > max_bytes:
        raise ValueError(f"a message of {nbytes} bytes is longer than {max_bytes}")
    message = json.loads(_receive_exactly(sock, nbytes))
    if not isinstance(message, dict):
        raise ValueError("a message must be a JSON object")
    return message, list(fds)


class HandshakeServer:
    """Answers handshakes on a Unix socket, one at a time, in a thread of its own. A context
    manager.
    """

    def __init__(self, path: Path, offer: Offer) -> None:
        self._offer = offer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.listen(16)
        self._thread = threading.Thread(target=self._serve, name="handshake", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return  # closed
            with peer:
                peer.settimeout(PEER_TIMEOUT_S)
                try:
                    self._answer(peer)
                except (OSError, ValueError, struct.error):
                    continue  # a peer that cannot speak is left alone

    def _answer(self, peer: socket.socket) -> None:
        hello, _ = _receive(peer, MAX_HELLO_BYTES)
        refusal = self._refusal(hello)
        if refusal:
            _send(peer, {"error": refusal}, [])
            return
        offer = self._offer
        port_offset = offer.window_offset + hello["port"] * offer.geometry.port_bytes
        fds = [offer.window_fd] if offer.window_fd >= 0 else []
        _send(peer, {**offer.to_mapping(), "port_offset": port_offset}, fds)

    def _refusal(self, hello: dict[str, Any]) -> str | None:
        version, layout, port = (hello.get(key) for key in ("version", "layout_hash", "port"))
        if version != protocol.VERSION or layout != protocol.layout_hash():
            return (
                f"the SmartNIC speaks ring protocol {version!r} with layout {layout!r}, the host "
                f"{protocol.VERSION} with {protocol.layout_hash()}; install one version on both"
            )
        if type(port) is not int or not 0 <= port < self._offer.num_ports:
            return f"there is no port {port!r}; the window has {self._offer.num_ports}"
        return None

    def close(self) -> None:
        """Stop answering; idempotent."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()
        self._thread.join(PEER_TIMEOUT_S)

    def __enter__(self) -> HandshakeServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def fetch_offer(path: Path, *, timeout_s: float = 30.0) -> Offer:
    """The host's offer, so that somebody else can make it once the host is gone.

    The descriptor in it belongs to the caller. Raises HandshakeRefusedError as `connect` does.
    """
    answer, fds = _ask(path, 0, timeout_s)
    return Offer.from_mapping(answer, fds[0] if fds else -1)


def connect(path: Path, *, port: int = 0, timeout_s: float = 30.0) -> Session:
    """Shake hands with the host at `path`, and map the port or open its GPU memory.

    Raises HandshakeRefusedError when the host refuses or does not answer within `timeout_s`.
    """
    answer, fds = _ask(path, port, timeout_s)
    try:
        link = _link(answer, fds)
    finally:
        for fd in fds:
            os.close(fd)
    return Session(link, ModelCard.from_mapping(answer["card"]), answer["server_info"])


def _link(answer: dict[str, Any], fds: list[int]) -> Link:
    geometry, offset, window = (
        Geometry(**answer["geometry"]),
        answer["port_offset"],
        answer["window"],
    )
    if not answer["window_handle"]:
        return SharedMemoryLink.from_fd(fds[0], offset, geometry, window)
    # Only who is offered GPU memory needs CUDA.
    from engine.link.staged import CudaCopier, StagedLink

    return StagedLink(CudaCopier(bytes.fromhex(answer["window_handle"]), offset), geometry, window)


def _ask(path: Path, port: int, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
    """The host's answer and its descriptors, which belong to the caller."""
    hello = {"version": protocol.VERSION, "layout_hash": protocol.layout_hash(), "port": port}
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        try:
            _connect_until(sock, path, deadline)
            _send(sock, hello, [])
            answer, fds = _receive(sock, MAX_ANSWER_BYTES)
        except (OSError, ValueError) as error:
            raise HandshakeRefusedError(
                f"no handshake with the host at {path} within {timeout_s:g} s: {error}"
            ) from error
    if "error" in answer:
        raise HandshakeRefusedError(str(answer["error"]))
    return answer, fds


def _connect_until(sock: socket.socket, path: Path, deadline: float) -> None:
    """The host may not listen yet: try until the deadline."""
    while True:
        try:
            sock.connect(str(path))
            return
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
