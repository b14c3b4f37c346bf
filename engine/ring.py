"""The producer and consumer of one port: slots, credits, generations, sessions, over any link."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine import protocol
from engine.link import Link, LinkError
from engine.protocol import (
    COUNTERS,
    IDENTITY,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    PROGRESS,
    RECORD,
    SLOT_STATUS,
    Geometry,
    RequestFlag,
)
from engine.ring_library import crc32c


class RingFull(Exception):  # noqa: N818 - a state, not a mistake
    """No slot is free: the device has as many requests as the ring has slots."""


class HandshakeError(LinkError):
    """The other side is not the one that this build can talk to."""


@dataclass(frozen=True, slots=True)
class RequestParams:
    """What a request asks of the device. Ranges are checked there again (ERROR_PARAMETERS)."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int = -1
    priority: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """One use of one slot; the token ring's entries carry both numbers."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The device's progress and counters, as last shown (engine/protocol.py names the fields)."""

    epoch: int
    heartbeat: int
    pass_beat: int
    pace_late_steps: int
    pace_late_ns: int
    clock_ns: int
    state: int
    error: int
    picked_up: int
    num_running: int
    num_waiting: int
    free_pages: int
    total_pages: int
    num_steps: int
    step_ns: int
    gap_ns: int
    idle_ns: int
    prompt_tokens: int
    generation_tokens: int
    num_preemptions: int
    records_accepted: int
    records_rejected: int
    records_torn: int
    doorbells_refused: int
    indices_refused: int
    ring_stalls: int
    cancels: int
    pickup_ns: int


@dataclass(frozen=True, slots=True)
class SlotTimes:
    """One request's way through the device, ns of the device's clock; 0: did not happen."""

    generation: int
    picked_up_ns: int
    admitted_ns: int
    first_token_ns: int
    finished_ns: int
    num_preemptions: int
    num_generated: int


@dataclass(frozen=True, slots=True)
class Address:
    """What every record of one session carries."""

    epoch: int
    session: int


def encode_record(
    params: RequestParams,
    prompt_ids: Sequence[int],
    address: Address,
    sequence: int,
    ticket: Ticket,
) -> bytes:
    """One record, whole and with its CRC32C. Prompt ids must fit u32."""
    header = np.zeros(1, RECORD.dtype)
    record = header[0]
    record["epoch"], record["session"] = address.epoch, address.session
    record["sequence"], record["slot"] = sequence, ticket.slot
    record["generation"] = ticket.generation
    record["flags"] = RequestFlag.IGNORE_EOS if params.ignore_eos else 0
    record["seed"] = params.seed & 0xFFFFFFFFFFFFFFFF
    record["num_prompt_tokens"] = len(prompt_ids)
    record["num_stop_token_ids"] = len(params.stop_token_ids)
    record["num_logit_bias"] = len(params.logit_bias)
    for name in (
        "max_tokens", "min_tokens", "num_logprobs", "priority", "top_k", "temperature", "top_p",
        "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    ):  # fmt: skip
        record[name] = getattr(params, name)
    bias = np.array(list(params.logit_bias), dtype=[("id", "<u4"), ("bias", "<f4")])
    tail = (
        np.array(params.stop_token_ids, "<u4").tobytes()
        + bias.tobytes()
        + np.array(prompt_ids, "<u4").tobytes()
    )
    record["record_bytes"] = RECORD.dtype.itemsize + len(tail)
    body = header.tobytes()[4:] + tail
    return crc32c(body).to_bytes(4, "little") + body


class RingClient:
    """The SmartNIC's end of one port.

    `submit`, `cancel`, `release` belong to one thread, `read_tokens` to another (or the same). A
    slot is free again when its terminal entry was handled (`release`). Opening it takes the port
    over from whoever had it before: the device drops that one's requests.

    Raises HandshakeError when the layouts differ or the device does not answer within `timeout_s`.
    """

    def __init__(self, link: Link, *, timeout_s: float = 10.0) -> None:
        self.link = link
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self.geometry, epoch = self._read_identity()
        self.address = Address(epoch, self._open_session())
        status = np.frombuffer(
            link.read(
                self.geometry.status_offset, self.geometry.num_slots * SLOT_STATUS.dtype.itemsize
            ),
            SLOT_STATUS.dtype,
        )
        self._generations: list[int] = status["generation"].tolist()
        self._free = list(range(self.geometry.num_slots - 1, -1, -1))
        # No count of an earlier session, should its WRITE come late, equals one of this session's.
        self._num_cancels = self.address.session << 32

    def _read_identity(self) -> tuple[Geometry, int]:
        line = np.frombuffer(self.link.read(0, IDENTITY.dtype.itemsize), IDENTITY.dtype)[0]
        if line["magic"] != protocol.MAGIC:
            raise HandshakeError("the memory behind the link is not a Blinkbed window")
        if line["version"] != protocol.VERSION or line["layout_hash"] != protocol.layout_hash():
            raise HandshakeError(
                f"the device speaks ring protocol {line['version']} with layout "
                f"{int(line['layout_hash']):016x}, this build {protocol.VERSION} with "
                f"{protocol.layout_hash():016x}; install the same version on both sides"
            )
        geometry = Geometry(
            num_slots=int(line["num_slots"]),
            token_ring_entries=int(line["token_ring_entries"]),
            max_context=int(line["max_context"]),
            vocab_size=int(line["vocab_size"]),
        )
        return geometry, int(line["epoch"])

    def _progress(self) -> np.void:
        offset = protocol.C_CONSTANTS["kProgressOffset"]
        line = np.frombuffer(self.link.read(offset, PROGRESS.dtype.itemsize), PROGRESS.dtype)
        record: np.void = line[0]
        return record

    def _open_session(self) -> int:
        """Announce a new session and wait until the device has dropped the earlier one."""
        before = self._progress()
        # The tag in a doorbell has 16 bits and must differ from the last session's.
        session = (int(before["session_ack"]) + 1) & 0xFFFFFFFF
        session += session & 0xFFFF == 0
        self.link.write(
            [
                (protocol.control_offset("cancel_count"), bytes(8)),
                (protocol.control_offset("session"), session.to_bytes(4, "little")),
            ]
        )
        while True:
            progress = self._progress()
            if progress["session_ack"] == session:
                break
            if time.monotonic() > self._deadline:
                raise HandshakeError(f"the device did not answer within {self._timeout_s:g} s")
            time.sleep(0.001)
        progress = self._progress()  # that READ may have met the line half written
        self._head = int(progress["token_tail"])
        self._sequence = int(progress["picked_up"])
        self._write_consumer_index()
        return session

    def _write_consumer_index(self) -> None:
        self.link.write(
            [(protocol.control_offset("consumer_index"), self._head.to_bytes(8, "little"))]
        )

    @property
    def num_free_slots(self) -> int:
        """Credits: how many requests may be submitted now."""
        return len(self._free)

    def submit(self, params: RequestParams, prompt_ids: Sequence[int]) -> Ticket:
        """Post one request. Raises RingFull without a free slot, ValueError if it cannot be
        written.
        """
        if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"at most {MAX_STOP_TOKEN_IDS} stop token ids")
        if len(params.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"at most {MAX_LOGIT_BIAS} logit biases")
        if params.num_logprobs >= self.geometry.token_ring_entries:
            raise ValueError(
                f"a token with {params.num_logprobs} alternatives does not fit into a token ring "
                f"of {self.geometry.token_ring_entries} entries"
            )
        if len(prompt_ids) > self.geometry.max_context:
            raise ValueError(f"at most {self.geometry.max_context} prompt tokens")
        if not self._free:
            raise RingFull
        slot = self._free[-1]
        ticket = Ticket(slot, (self._generations[slot] + 1) & 0xFFFFFFFF)
        sequence = self._sequence + 1
        try:
            record = encode_record(params, prompt_ids, self.address, sequence, ticket)
        except OverflowError as error:
            raise ValueError(f"a number does not fit its field of the record: {error}") from None
        doorbell = protocol.doorbell_word(sequence, self.address.session, slot)
        self.link.write(
            [
                (self.geometry.slot_offset(slot), record),
                (self.geometry.doorbell_offset(sequence), doorbell.to_bytes(8, "little")),
            ]
        )
        self._free.pop()
        self._generations[slot] = ticket.generation
        self._sequence = sequence
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ask the device to end a request; its terminal entry says how it ended."""
        self._num_cancels += 1
        self.link.write(
            [
                (
                    self.geometry.cancel_offset(ticket.slot),
                    ticket.generation.to_bytes(4, "little"),
                ),
                (
                    protocol.control_offset("cancel_count"),
                    self._num_cancels.to_bytes(8, "little"),
                ),
            ]
        )

    def release(self, ticket: Ticket) -> None:
        """Give the slot of an ended request back."""
        assert self._generations[ticket.slot] == ticket.generation, "released twice"
        assert ticket.slot not in self._free, "released twice"
        self._free.append(ticket.slot)

    def read_tokens(self, timeout_s: float) -> np.ndarray:
        """The next entries of the token ring (protocol.TOKEN_ENTRY), consumed; empty after
        timeout.
        """
        entries = self.link.read_tokens(self._head, timeout_s)
        if len(entries):
            self._head += len(entries)
            self._write_consumer_index()
        return entries

    def snapshot(self) -> Snapshot:
        """Progress and counters of the device as of its last turn."""
        progress = self._progress()
        offset = protocol.C_CONSTANTS["kCountersOffset"]
        raw = self.link.read(offset, COUNTERS.dtype.itemsize)
        counters = np.frombuffer(raw, COUNTERS.dtype)[0]
        values = {
            name: int(source[name])
            for source in (progress, counters)
            for name in Snapshot.__dataclass_fields__
            if name in (source.dtype.names or ())
        }
        return Snapshot(epoch=self.address.epoch, **values)

    def slot_times(self, slot: int) -> SlotTimes:
        """The slot's status line."""
        raw = self.link.read(self.geometry.slot_status_offset(slot), SLOT_STATUS.dtype.itemsize)
        status = np.frombuffer(raw, SLOT_STATUS.dtype)[0]
        return SlotTimes(**{name: int(status[name]) for name in SlotTimes.__dataclass_fields__})

    def close(self) -> None:
        """Close the link; idempotent. The device keeps the session until another one opens."""
        self.link.close()
