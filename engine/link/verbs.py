"""The verbs link: one-sided RDMA over a reliable connected queue pair.

WRITEs of a chain go to the device as one list, of which only the last one is signalled; small ones
travel inside the work request. `write` does not wait for the acknowledgement: the device keeps the
order, and a chain that cannot be delivered puts the queue pair into error, which the next call
reports. Completions of one queue pair come in order, so a number is enough to know what is done.

Nothing here depends on what the RDMA device is: Soft-RoCE, or a SmartNIC's own.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine import protocol
from engine.link import LinkError, LinkInfo
from engine.link.token_reader import LANDING_BYTES, TokenReader
from engine.link.verbs_config import HANDSHAKE_PORT, VerbsConfig
from engine.link.verbs_device import VerbsDevice
from engine.link.verbs_errors import VerbsSetupError, enums, pyverbs
from engine.link.verbs_exchange import MAX_ANSWER_BYTES, receive_message, send_message
from engine.link.verbs_gid import gid_address
from engine.link.verbs_qp import QueuePair, QueuePairFacts
from engine.protocol import Geometry

MAX_CHAIN = 8  # work requests in one list
MIN_STAGING_BYTES = 1 << 20  # of WRITEs in flight
READ_BYTES = 1 << 16  # one READ; longer ones are done in parts
CELL_BYTES = 256  # of an inline WRITE's data
SPIN_S = 1e-3  # how long a caller in a hurry looks at the completion queue without pause
NAP_S = 50e-6  # between two looks after that
LOSS_MARGIN_S = 5.0  # beyond the device's own retries
RETRY_S, MAX_RETRY_S = 0.1, 1.0  # between two handshakes, doubling
CONNECT_S = 2.0  # for one TCP connection: after a loss the kernel's own retries come too late
ANSWER_S = 15.0  # for the offer, which may be several MB


@dataclass(frozen=True, slots=True)
class VerbsSession:
    """A link to one port, and the host's offer that came with it."""

    link: VerbsLink
    offer: dict[str, Any]


class VerbsLink:
    """One port of the window, over RDMA. Thread-safe; see engine.link.Link.

    Takes over `device`, `queue_pair` (connected towards `peer`) and `sock`: closing the link closes
    them.
    """

    def __init__(
        self,
        device: VerbsDevice,
        queue_pair: QueuePair,
        peer: QueuePairFacts,
        geometry: Geometry,
        info: LinkInfo,
        *,
        config: VerbsConfig,
        sock: socket.socket | None = None,
    ) -> None:
        self.info = info
        self.geometry = geometry
        # Kept: the geometry computes it anew each time.
        self._port_bytes = geometry.port_bytes
        self._device, self._queue_pair, self._peer, self._sock = device, queue_pair, peer, sock
        self._inline_bytes = min(config.inline_bytes, CELL_BYTES)
        self._depth = config.queue_depth
        self._wait_s = config.loss_s + LOSS_MARGIN_S
        self._error_type: type[Exception] = pyverbs("pyverbs_error").PyverbsError
        self._post_send, self._poll_cq = queue_pair.qp.post_send, queue_pair.cq.poll
        self._rkey = peer.rkey
        self._allocate_memory()
        self._prepare_requests()
        self._lock = threading.Lock()  # the queue pair, the counters, the staging memory
        self._read_lock = threading.Lock()  # the landing place of `read`
        self._posted = 0  # number of the last signalled list
        self._completed = 0
        self._in_flight: deque[tuple[int, int, int]] = deque()  # number, requests, staging end
        self._requests_in_flight = 0
        self._staging_head = self._staging_tail = 0  # bytes ever taken, bytes ever given back
        self._reader = TokenReader(geometry, self._base + self._token_landing)
        self._failure = ""
        self._is_open = True

    def _allocate_memory(self) -> None:
        """One region: staging | inline cells | landing of reads | landing of tokens."""
        self._staging_bytes = max(MIN_STAGING_BYTES, 4 * self.geometry.slot_bytes)
        self._cells = self._staging_bytes
        self._landing = self._cells + MAX_CHAIN * CELL_BYTES
        self._token_landing = self._landing + READ_BYTES
        size = self._token_landing + LANDING_BYTES
        self._region = self._device.register(size, enums().IBV_ACCESS_LOCAL_WRITE)
        self._base: int = self._region.buf
        buffer = (ctypes.c_uint8 * size).from_address(self._base)
        self._memory = memoryview(buffer).cast("B")

    def _prepare_requests(self) -> None:
        """Work requests are made once and filled in for each post: pyverbs never frees the C
        structs behind them. Number i is followed by number i - 1, and 0 is the last of every list.
        """
        wr, e = pyverbs("wr"), enums()
        self._last, self._inline = e.IBV_SEND_SIGNALED, e.IBV_SEND_INLINE
        self._last_inline = self._last | self._inline
        self._requests: list[tuple[Any, Any]] = []  # scatter element, work request
        for index in range(MAX_CHAIN):
            element, request = self._make_request(wr, e.IBV_WR_RDMA_WRITE)
            if index:
                request.next_wr = self._requests[-1][1]
            self._requests.append((element, request))
        self._read_element, self._read_request = self._make_request(wr, e.IBV_WR_RDMA_READ)
        self._read_request.send_flags = self._last

    def _make_request(self, wr: Any, opcode: int) -> tuple[Any, Any]:
        element = wr.SGE(self._base, 0, self._region.lkey)
        request = wr.SendWR(num_sge=1, sg=[element], opcode=opcode)
        request.sg_list = element  # from here on what is set in the element is what is posted
        return element, request

    def write(self, chain: Sequence[tuple[int, bytes]]) -> None:
        """Post the chain; returns before it is acknowledged (see `flush`)."""
        num_bytes = 0
        for offset, data in chain:
            size = len(data)
            if offset < 0 or offset + size > self._port_bytes:
                self._refuse_range(offset, size)
            num_bytes += size
        with self._lock:
            if len(chain) <= MAX_CHAIN:
                self._post_writes(chain, num_bytes)
                return
            for start in range(0, len(chain), MAX_CHAIN):
                self._post_writes(chain[start : start + MAX_CHAIN], num_bytes)

    def _post_writes(self, chain: Sequence[tuple[int, bytes]], num_bytes: int) -> None:
        index = count = len(chain)
        self._wait_for_room(count, num_bytes)
        base, memory, remote = self._base, self._memory, self._peer.address
        for offset, data in chain:
            index -= 1
            element, request = self._requests[index]
            size = len(data)
            if size <= self._inline_bytes:
                start = self._cells + index * CELL_BYTES
                request.send_flags = self._last_inline if index == 0 else self._inline
            else:
                start = self._stage(size)
                request.send_flags = self._last if index == 0 else 0
            memory[start : start + size] = data
            element.addr = base + start
            element.length = size
            request.set_wr_rdma(self._rkey, remote + offset)
        self._post(self._requests[count - 1][1], self._requests[0][1], count)

    def _stage(self, size: int) -> int:
        """A contiguous piece of the staging ring; there is room (`_wait_for_room`)."""
        start = self._staging_head % self._staging_bytes
        if start + size > self._staging_bytes:
            self._staging_head += self._staging_bytes - start
            start = 0
        self._staging_head += size
        return start

    def _has_room(self, num_requests: int, num_bytes: int) -> bool:
        # Twice: a piece that would cross the staging ring's end begins at its start.
        used = self._staging_head - self._staging_tail + 2 * num_bytes
        in_flight = self._requests_in_flight + num_requests
        return in_flight <= self._depth and used <= self._staging_bytes

    def _wait_for_room(self, num_requests: int, num_bytes: int) -> None:
        """Called with the lock, which is let go while waiting."""
        if self._failure or not self._is_open:
            self._check_open()
        if self._has_room(num_requests, num_bytes):
            return
        if 2 * num_bytes > self._staging_bytes:
            raise ValueError(
                f"a chain of {num_bytes} bytes is longer than {self._staging_bytes // 2}"
            )
        deadline = time.monotonic() + self._wait_s
        while True:
            self._poll()
            if self._has_room(num_requests, num_bytes):
                return
            if time.monotonic() > deadline:
                self._fail("the device does not acknowledge WRITEs")
            self._lock.release()
            time.sleep(NAP_S)
            self._lock.acquire()
            self._check_open()

    def _post(self, first: Any, last: Any, count: int) -> int:
        """Hand a list over; the number of its completion."""
        self._posted += 1
        last.wr_id = self._posted
        try:
            self._post_send(first)
        except self._error_type as error:
            self._fail(f"ibv_post_send failed: {error}")
        self._requests_in_flight += count
        self._in_flight.append((self._posted, count, self._staging_head))
        return self._posted

    def _poll(self) -> None:
        """Take completions; raises LinkError if one of them is an error."""
        try:
            count, completions = self._poll_cq(16)
        except self._error_type as error:
            self._fail(f"ibv_poll_cq failed: {error}")
        if not count:
            return
        for completion in completions:
            if completion.status:
                self._fail(_status_text(completion.status))
            self._completed = completion.wr_id
        while self._in_flight and self._in_flight[0][0] <= self._completed:
            _, requests, self._staging_tail = self._in_flight.popleft()
            self._requests_in_flight -= requests

    def _wait(self, number: int, what: str, *, spin_s: float = SPIN_S) -> None:
        """Until list `number` is complete; called without the lock.

        A look takes a few us with the interpreter's lock, which is let go after each.
        """
        started = time.monotonic()
        while True:
            with self._lock:
                if self._failure or not self._is_open:
                    self._check_open()
                if self._completed < number:
                    self._poll()
                if self._completed >= number:
                    return
            waited_s = time.monotonic() - started
            if waited_s < spin_s:
                os.sched_yield()  # also lets the interpreter's lock go; sleep(0) sets a timer
            elif waited_s < self._wait_s:
                time.sleep(NAP_S)
            else:
                self._fail(f"no completion of an RDMA {what} within {self._wait_s:.1f} s")

    def flush(self) -> None:
        """Wait until everything written so far is acknowledged by the other side."""
        with self._lock:
            self._check_open()
            number = self._posted
        self._wait(number, "WRITE")

    def _post_read(self, landing: int, offset: int, num_bytes: int) -> int:
        with self._lock:
            self._wait_for_room(1, 0)
            self._read_element.addr = self._base + landing
            self._read_element.length = num_bytes
            self._read_request.set_wr_rdma(self._rkey, self._peer.address + offset)
            return self._post(self._read_request, self._read_request, 1)

    def read(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or offset + nbytes > self._port_bytes:
            self._refuse_range(offset, nbytes)
        parts = []
        with self._read_lock:
            for start in range(0, nbytes, READ_BYTES):
                size = min(nbytes - start, READ_BYTES)
                self._wait(self._post_read(self._landing, offset + start, size), "READ")
                parts.append(bytes(self._memory[self._landing : self._landing + size]))
        return b"".join(parts)

    def read_tokens(self, head: int, timeout_s: float) -> np.ndarray:
        return self._reader.read(head, timeout_s, self._fetch_tokens)

    def _fetch_tokens(self, offset: int, num_bytes: int) -> None:
        number = self._post_read(self._token_landing, offset, num_bytes)
        self._wait(number, "READ", spin_s=0)  # no hurry: others have the processor meanwhile

    @property
    def state(self) -> str:
        """The queue pair's state, as the device says."""
        with self._lock:
            return self._queue_pair.state if self._is_open else "RESET"

    def close(self) -> None:
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
        with self._read_lock, self._reader.lock, self._lock:  # readers have left by now
            self._queue_pair.close()
            self._memory.release()
            self._region.close()
            self._device.close()
        if self._sock is not None:
            self._sock.close()

    def _refuse_range(self, offset: int, nbytes: int) -> None:
        raise LinkError(f"bytes {offset} to {offset + nbytes} are outside the port")

    def _check_open(self) -> None:
        if not self._is_open:
            raise LinkError("the link is closed")
        if self._failure:
            raise LinkError(self._failure)

    def _fail(self, reason: str) -> None:
        """The link is lost, for good: every later call says the same."""
        self._failure = f"the RDMA link is lost: {reason}"
        raise LinkError(self._failure)


def _status_text(status: int) -> str:
    e = enums()
    names = {value: name for name, value in vars(e).items() if name.startswith("IBV_WC_")}
    name = names.get(status, f"status {status}")
    meaning = {
        "IBV_WC_RETRY_EXC_ERR": "the other side does not answer",
        "IBV_WC_REM_ACCESS_ERR": "the other side refuses the key or the address",
        "IBV_WC_REM_INV_REQ_ERR": "the other side refuses the request",
        "IBV_WC_WR_FLUSH_ERR": "the queue pair is in error",
    }.get(name, "the request failed")
    return f"{meaning} ({name})"


def connect_verbs(
    host: str,
    tcp_port: int = HANDSHAKE_PORT,
    *,
    port: int = 0,
    config: VerbsConfig | None = None,
    timeout_s: float = 30.0,
) -> VerbsSession:
    """Shake hands with the RNIC's side at `host`:`tcp_port` and connect to a port of the window.

    Waits up to `timeout_s` for a host that is not ready. Raises LinkError (VerbsSetupError where
    only the user can help).
    """
    config = config or VerbsConfig()
    deadline = time.monotonic() + timeout_s
    pause_s = RETRY_S
    while True:
        try:
            return _connect_once(host, tcp_port, port, config)
        except _NotYetError as error:
            if time.monotonic() + pause_s > deadline:
                raise LinkError(
                    f"no link to {host}:{tcp_port} within {timeout_s:g} s: {error}"
                ) from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_RETRY_S)


class _NotYetError(Exception):
    """Worth another try."""


def _connect_once(host: str, tcp_port: int, port: int, config: VerbsConfig) -> VerbsSession:
    try:
        sock = socket.create_connection((host, tcp_port), timeout=CONNECT_S)
    except OSError as error:
        raise _NotYetError(str(error)) from error
    sock.settimeout(ANSWER_S)
    try:
        return connect_over(sock, port=port, config=config)
    except OSError as error:
        sock.close()
        raise _NotYetError(str(error)) from error
    except BaseException:
        sock.close()
        raise


def connect_over(sock: socket.socket, *, port: int, config: VerbsConfig) -> VerbsSession:
    """The verbs handshake over a connected TCP socket, which the link keeps."""
    near_address = sock.getsockname()[0]
    device = VerbsDevice(config, near_address=near_address)
    try:
        queue_pair = QueuePair(device, config, access=0)
        question = {
            "version": protocol.VERSION,
            "layout_hash": protocol.layout_hash(),
            "port": port,
            "verbs": queue_pair.facts().to_mapping(),
        }
        send_message(sock, question)
        answer = receive_message(sock, MAX_ANSWER_BYTES)
        if "error" in answer:
            if answer.get("retry"):
                raise _NotYetError(answer["error"])
            raise VerbsSetupError(str(answer["error"]))
        peer = QueuePairFacts.from_mapping(answer["verbs"])
        queue_pair.connect(peer)
        geometry = Geometry(**answer["geometry"])
        if peer.num_bytes != geometry.port_bytes:
            raise VerbsSetupError(
                f"the other side registered {peer.num_bytes} bytes, a port has "
                f"{geometry.port_bytes}"
            )
        info = LinkInfo(
            "verbs",
            str(answer.get("window", "")),
            f"RDMA over {device.description} to {gid_address(peer.gid)}, "
            f"path MTU {queue_pair.mtu_bytes}",
        )
        link = VerbsLink(device, queue_pair, peer, geometry, info, config=config, sock=sock)
    except BaseException:
        device.close()
        raise
    return VerbsSession(link, {key: value for key, value in answer.items() if key != "verbs"})
