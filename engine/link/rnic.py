"""``python -m engine.link.rnic``: the GPU's side of the verbs link.

Maps the window (a device-DAX node, a file, shared memory), and gives each SmartNIC that asks a
queue pair and a memory region over exactly its port. Takes no part in serving: everything after the
handshake is one-sided. A later SmartNIC on the same port replaces the earlier one: that one's queue
pair and key are gone before the new ones exist, so nothing late can land. All keys are also
withdrawn when the host takes its offer back (a new start of the engine). SIGUSR1 puts every queue
pair into the state ERR: a fault to be tried out.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from engine import progress
from engine.link import LinkError
from engine.link.verbs_config import HANDSHAKE_PORT, VerbsConfig
from engine.link.verbs_device import VerbsDevice
from engine.link.verbs_errors import VerbsSetupError, enums
from engine.link.verbs_exchange import MAX_QUESTION_BYTES, receive_message, send_message
from engine.link.verbs_offer import offer_serial, read_offer
from engine.link.verbs_qp import QueuePair, QueuePairFacts

PEER_TIMEOUT_S = 10.0
WATCH_S = 0.2
KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
DAX_SYSFS = Path("/sys/bus/dax/devices")


class WindowMemory:
    """The window mapped into this process. A context manager."""

    def __init__(self, path: Path, offset: int = 0, num_bytes: int = 0) -> None:
        size_file = DAX_SYSFS / path.name / "size"
        try:
            if not num_bytes and size_file.exists():
                num_bytes = int(size_file.read_text())
            fd = os.open(path, os.O_RDWR)
            try:
                self._mapping = mmap.mmap(
                    fd, num_bytes or os.fstat(fd).st_size - offset, offset=offset
                )
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            raise VerbsSetupError(f"the window {path} cannot be mapped: {error}") from error
        self.view = memoryview(self._mapping)
        self._anchor = ctypes.c_char.from_buffer(self._mapping)
        self.address = ctypes.addressof(self._anchor)

    def close(self) -> None:
        """Unmap."""
        del self._anchor
        self.view.release()
        self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(slots=True)
class PortSession:
    """One SmartNIC on one port."""

    queue_pair: QueuePair
    region: Any
    sock: socket.socket
    is_open: bool = True

    def close(self) -> None:
        """Destroy the queue pair first, then withdraw the key; idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        self.queue_pair.close()
        self.region.close()
        try:
            self.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that watches it
        except OSError:
            pass


class Rnic:
    """Serves SmartNICs over `memory`. A context manager; `close` is idempotent."""

    def __init__(self, memory: WindowMemory, config: VerbsConfig, address: tuple[str, int]) -> None:
        self._memory = memory
        self._config = config
        self.device = VerbsDevice(config, near_address=address[0])
        self._sessions: dict[int, PortSession] = {}
        self._lock = threading.Lock()
        try:
            self._listener = socket.create_server(address, backlog=16)
        except OSError as error:
            raise VerbsSetupError(
                f"cannot listen on {address[0] or '*'}:{address[1]}: {error}"
            ) from error
        self.port = self._listener.getsockname()[1]

    def serve(self) -> None:
        """Answer SmartNICs until `close`."""
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve_peer, args=(sock, f"{peer[0]}:{peer[1]}"), daemon=True
            ).start()

    def _serve_peer(self, sock: socket.socket, peer: str) -> None:
        with sock:
            sock.settimeout(PEER_TIMEOUT_S)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            try:
                self._answer(sock, peer)
            except (OSError, ValueError, LinkError) as error:
                _say("failed", peer=peer, reason=str(error))

    def _answer(self, sock: socket.socket, peer: str) -> None:
        hello = receive_message(sock, MAX_QUESTION_BYTES)
        serial = offer_serial(self._memory.view)
        offer = read_offer(self._memory.view)
        refusal = _refusal(hello, offer)
        if refusal or offer is None:
            send_message(sock, {"error": refusal, "retry": offer is None})
            _say("refused", peer=peer, reason=refusal)
            return
        port = hello["port"]
        wanted = QueuePairFacts.from_mapping(hello.get("verbs"))
        session, facts = self._open(port, offer["port_bytes"], wanted, sock)
        try:
            send_message(sock, {**offer, "verbs": facts.to_mapping()})
            _say("connected", peer=peer, port=port, qpn=facts.qpn, mtu=facts.mtu_bytes)
            self._watch(sock, session, serial)
        finally:
            with self._lock:
                session.close()
                if self._sessions.get(port) is session:
                    del self._sessions[port]
            _say("disconnected", peer=peer, port=port)

    def _open(
        self, port: int, port_bytes: int, peer: QueuePairFacts, sock: socket.socket
    ) -> tuple[PortSession, QueuePairFacts]:
        flags = enums()
        access = (
            flags.IBV_ACCESS_LOCAL_WRITE
            | flags.IBV_ACCESS_REMOTE_WRITE
            | flags.IBV_ACCESS_REMOTE_READ
        )
        with self._lock:
            earlier = self._sessions.pop(port, None)
            if earlier is not None:
                earlier.close()
            address = self._memory.address + port * port_bytes
            region = self.device.register(port_bytes, access, address)
            queue_pair = QueuePair(self.device, self._config, access=access)
            session = PortSession(queue_pair, region, sock)
            try:
                queue_pair.connect(peer)
            except LinkError:
                session.close()
                raise
            self._sessions[port] = session
        return session, queue_pair.facts(region)

    def _watch(self, sock: socket.socket, session: PortSession, serial: int) -> None:
        """Until the SmartNIC goes, is replaced, or the host withdraws its offer."""
        while session.is_open and offer_serial(self._memory.view) == serial:
            readable, _, _ = select.select([sock], [], [], WATCH_S)
            if readable and not _still_there(sock):
                return

    def break_off(self) -> None:
        """Every queue pair to the state ERR."""
        for session in list(self._sessions.values()):
            session.queue_pair.break_off()
            _say("broken off", qpn=session.queue_pair.qp.qp_num)

    def close(self) -> None:
        """Destroy every queue pair, withdraw every key, stop listening."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()
        with self._lock:
            for session in self._sessions.values():
                session.close()
            self._sessions.clear()
        self.device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _still_there(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(4096))
    except OSError:
        return False


def _refusal(hello: dict[str, Any], offer: dict[str, Any] | None) -> str:
    if offer is None:
        return "the engine has not offered a window yet"
    for name in ("version", "layout_hash"):
        if hello.get(name) != offer[name]:
            return (
                f"the SmartNIC speaks ring protocol {hello.get('version')!r} with layout "
                f"{hello.get('layout_hash')!r}, the host {offer['version']} with "
                f"{offer['layout_hash']}; install one version on both"
            )
    port = hello.get("port")
    if type(port) is not int or not 0 <= port < offer["num_ports"]:
        return f"there is no port {port!r}; the window has {offer['num_ports']}"
    return ""


def _say(event: str, **facts: Any) -> None:
    """One line of JSON for whoever started us."""
    print(json.dumps({"event": event, **facts}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.link.rnic", description=__doc__)
    parser.add_argument("--window", type=Path, required=True, help="/dev/daxX.Y or a file")
    parser.add_argument("--offset", type=int, default=0, help="where the window begins in it")
    parser.add_argument("--bytes", type=int, default=0, help="size; 0 takes all of it")
    parser.add_argument("--listen", default="", help="address for SmartNICs; default: all")
    parser.add_argument("--port", type=int, default=HANDSHAKE_PORT, help="TCP port for SmartNICs")
    parser.add_argument("--verbs", default="{}", help="VerbsConfig as JSON")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        config = VerbsConfig.from_json(arguments.verbs)
        with (
            WindowMemory(arguments.window, arguments.offset, arguments.bytes) as memory,
            Rnic(memory, config, (arguments.listen, arguments.port)) as rnic,
        ):
            _say(
                "ready",
                device=rnic.device.description,
                num_bytes=len(memory.view),
                port=rnic.port,
            )
            if progress.is_launched():
                progress.ready(f"the RNIC answers on port {rnic.port}: {rnic.device.description}")
            signal.signal(signal.SIGUSR1, lambda *_: rnic.break_off())
            rnic.serve()
    except LinkError as error:
        _say("error", reason=str(error))
        if progress.is_launched():
            progress.report("error", str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
