"""The ring protocol: what the SmartNIC and the GPU agree on, byte for byte.

The window is the only remotely reachable memory: `num_ports` equal ports, one per SmartNIC worker,
each its own memory region. Inside a port every 64-byte line has one writer:

    identity          GPU   who this is: magic, version, layout hash, epoch, geometry
    progress          GPU   heartbeat, clock, state; token_tail, picked_up, session_ack
    counters          GPU   what the scheduler did, for metrics and tests
    control           NIC   consumer index of the token ring, cancel count, session
    doorbells         NIC   u64 ring: sequence(32) | session tag(16) | slot(16) at [sequence % N]
    cancel words      NIC   u32 per slot: the generation to cancel
    slots             NIC   one record per slot
    slot status       GPU   per slot: generation, state, time stamps
    token ring        GPU   append-only log of tokens and terminals, self-validating entries

Zeroed memory is a valid empty ring: sequences start at 1. A record is posted as one chain of
WRITEs, record first, doorbell last; since a seen doorbell does not prove the payload visible, the
record's own sequence and CRC32C decide, and a torn record is looked at again, never executed. A
slot's generation grows by exactly one per request, and skips one when another session begins, so
late data of an earlier use is harmless. The epoch is new at each start of the GPU's side, the
session at each start of the SmartNIC's. A doorbell of an earlier session carries another tag and
therefore was never rung.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass

import numpy as np

from engine.layout import Struct

MAGIC = 0x4445424B4E494C42  # "BLNKBED" reversed, little-endian
VERSION = 1
LINE_BYTES = 64

MAX_STOP_TOKEN_IDS = 32
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
MAX_SLOTS_PER_PORT = 1 << 16


class EngineState(enum.IntEnum):
    """What the scheduler says of itself in the progress line."""

    EMPTY = 0  # zeroed memory: never started
    IDLE = 1
    RUNNING = 2
    DRAINING = 3
    STOPPED = 4
    FATAL = 5


class SlotState(enum.IntEnum):
    """A slot as the GPU sees it. FREE is the only state in which a record is picked up."""

    FREE = 0
    SUSPECT = 1  # doorbell seen, record not (yet) whole
    WAITING = 2
    RUNNING = 3
    ENDED = 4  # finished, its terminal entry does not fit into the token ring yet


class EntryKind(enum.IntEnum):
    NONE = 0
    TOKEN = 1  # a token; terminal too if finish_reason is set
    END = 2  # a terminal without a token
    ALTERNATIVE = 3  # one of the likeliest at the place of its slot's next TOKEN entry, best first


class FinishReason(enum.IntEnum):
    """Why a request ended; from ERROR_TORN on it is an error."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    ERROR_TORN = 16  # the record never became whole
    ERROR_RECORD = 17  # fields contradict each other or the geometry
    ERROR_EPOCH = 18  # written for an earlier start of the engine
    ERROR_SESSION = 19  # written by an earlier SmartNIC
    ERROR_GENERATION = 20
    ERROR_PARAMETERS = 21
    ERROR_TOKEN_ID = 22
    ERROR_CONTEXT = 23  # prompt + max_tokens beyond the context or the KV pool
    ERROR_MODEL = 24  # the forward pass gave no valid token (NaN)
    ERROR_SHUTDOWN = 25


FIRST_ERROR = FinishReason.ERROR_TORN


class RequestFlag(enum.IntFlag):
    IGNORE_EOS = 1


IDENTITY = Struct(
    "Identity",
    64,
    ("magic", "u8"),
    ("version", "u4"),
    ("port", "u4"),
    ("layout_hash", "u8"),
    ("epoch", "u8"),
    ("num_slots", "u4"),
    ("slot_bytes", "u4"),
    ("token_ring_entries", "u4"),
    ("max_context", "u4"),
    ("vocab_size", "u4"),
    ("reserved", "u4", 3),
)

PROGRESS = Struct(
    "Progress",
    64,
    ("heartbeat", "u8"),
    ("clock_ns", "u8"),
    ("token_tail", "u8"),  # entries ever written to the token ring
    ("picked_up", "u8"),  # sequence of the last doorbell taken
    ("session_ack", "u4"),
    ("state", "u4"),
    ("error", "u4"),
    ("pace_late_steps", "u4"),  # paced model: steps that took longer than they should have
    ("pass_beat", "u8"),  # grows inside a long forward pass, once per layer and more
    ("pace_late_ns", "u8"),  # by how much, together
)

COUNTERS = Struct(
    "Counters",
    192,
    ("num_running", "u4"),
    ("num_waiting", "u4"),
    ("free_pages", "u4"),
    ("total_pages", "u4"),
    ("num_steps", "u8"),
    ("step_ns", "u8"),  # time inside steps (forward and sampling)
    ("gap_ns", "u8"),  # time between steps while work was there
    ("idle_ns", "u8"),  # time with nothing to do
    ("prompt_tokens", "u8"),
    ("generation_tokens", "u8"),
    ("num_preemptions", "u8"),
    ("records_accepted", "u8"),
    ("records_rejected", "u8"),
    ("records_torn", "u8"),  # looks at a record that was not whole yet
    ("doorbells_refused", "u8"),  # slot out of range, or still live
    ("indices_refused", "u8"),  # consumer index outside the log
    ("ring_stalls", "u8"),  # sequence-steps paused because the token ring was full
    ("cancels", "u8"),
    ("pickup_ns", "u8"),  # sum over records of doorbell seen -> record whole
    ("reserved", "u8", 7),
)

CONTROL = Struct(
    "Control",
    64,
    ("consumer_index", "u8"),
    ("cancel_count", "u8"),
    ("session", "u4"),
    ("reserved", "u4", 11),
)

RECORD = Struct(
    "Record",
    128,
    ("crc32c", "u4"),  # over bytes [4, record_bytes)
    ("record_bytes", "u4"),
    ("epoch", "u8"),
    ("sequence", "u8"),
    ("session", "u4"),
    ("slot", "u4"),
    ("generation", "u4"),
    ("flags", "u4"),  # RequestFlag
    ("seed", "u8"),
    ("num_prompt_tokens", "u4"),
    ("max_tokens", "u4"),
    ("min_tokens", "u4"),
    ("num_stop_token_ids", "u4"),
    ("num_logit_bias", "u4"),
    ("num_logprobs", "i4"),  # alternatives that are wanted with each token; -1: nothing at all
    ("priority", "i4"),  # lower is served first
    ("top_k", "i4"),  # 0: off
    ("temperature", "f4"),  # 0: greedy
    ("top_p", "f4"),
    ("min_p", "f4"),
    ("repetition_penalty", "f4"),
    ("frequency_penalty", "f4"),
    ("presence_penalty", "f4"),
    ("reserved", "u4", 6),
)
"""Followed by u32 stop token ids, (u32 id, f32 bias) pairs, u32 prompt token ids."""

SLOT_STATUS = Struct(
    "SlotStatus",
    64,
    ("generation", "u4"),
    ("state", "u4"),
    ("picked_up_ns", "u8"),
    ("admitted_ns", "u8"),
    ("first_token_ns", "u8"),
    ("finished_ns", "u8"),
    ("num_preemptions", "u4"),
    ("num_generated", "u4"),
    ("reserved", "u8", 2),
)

TOKEN_ENTRY = Struct(
    "TokenEntry",
    32,
    ("sequence", "u8"),  # index in the log + 1; written last, with release
    ("slot", "u4"),
    ("generation", "u4"),
    ("token", "i4"),  # -1: none
    ("logprob", "f4"),
    ("kind", "u2"),
    ("finish_reason", "u2"),
    ("check", "u4"),  # CRC32C over the first 28 bytes
)

C_STRUCTS = [IDENTITY, PROGRESS, COUNTERS, CONTROL, RECORD, SLOT_STATUS, TOKEN_ENTRY]
C_ENUMS = [EngineState, SlotState, EntryKind, FinishReason]
C_CONSTANTS = {
    "kMagic": MAGIC,
    "kVersion": VERSION,
    "kLineBytes": LINE_BYTES,
    "kMaxStopTokenIds": MAX_STOP_TOKEN_IDS,
    "kMaxLogitBias": MAX_LOGIT_BIAS,
    "kMaxLogprobs": MAX_LOGPROBS,
    "kRequestIgnoreEos": int(RequestFlag.IGNORE_EOS),
    "kFirstError": int(FIRST_ERROR),
    "kIdentityOffset": 0,
    "kProgressOffset": 64,
    "kCountersOffset": 128,
    "kControlOffset": 320,
    "kDoorbellsOffset": 384,
}


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def layout_hash() -> int:
    """64 bits over every constant and field of the protocol; the two sides compare it at
    handshake.
    """
    structs = [(s.name, s.dtype.descr) for s in C_STRUCTS]
    enums = [(e.__name__, [(m.name, m.value) for m in e]) for e in C_ENUMS]
    text = repr((VERSION, C_CONSTANTS, structs, enums))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one port. Offsets are in bytes from the port's start.

    num_slots: power of two, requests that may be on the device at once through this port.
    token_ring_entries: power of two, at least 2 * num_slots.
    max_context: longest prompt + answer, tokens.
    """

    num_slots: int
    token_ring_entries: int
    max_context: int
    vocab_size: int

    def __post_init__(self) -> None:
        for name in ("num_slots", "token_ring_entries"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, not {value}")
        if self.num_slots > MAX_SLOTS_PER_PORT:
            raise ValueError(f"num_slots is at most {MAX_SLOTS_PER_PORT}, not {self.num_slots}")
        if self.max_context < 2:
            raise ValueError(f"max_context must be at least 2, not {self.max_context}")
        if self.vocab_size < 2:
            raise ValueError(f"vocab_size must be at least 2, not {self.vocab_size}")

    @property
    def slot_bytes(self) -> int:
        words = MAX_STOP_TOKEN_IDS + 2 * MAX_LOGIT_BIAS + self.max_context
        return _round_up(RECORD.dtype.itemsize + 4 * words, LINE_BYTES)

    @property
    def doorbells_offset(self) -> int:
        return C_CONSTANTS["kDoorbellsOffset"]

    @property
    def cancels_offset(self) -> int:
        return self.doorbells_offset + _round_up(8 * self.num_slots, LINE_BYTES)

    @property
    def slots_offset(self) -> int:
        return self.cancels_offset + _round_up(4 * self.num_slots, LINE_BYTES)

    @property
    def status_offset(self) -> int:
        return self.slots_offset + self.num_slots * self.slot_bytes

    @property
    def tokens_offset(self) -> int:
        return self.status_offset + self.num_slots * SLOT_STATUS.dtype.itemsize

    @property
    def port_bytes(self) -> int:
        end = self.tokens_offset + self.token_ring_entries * TOKEN_ENTRY.dtype.itemsize
        return _round_up(end, 4096)

    def doorbell_offset(self, sequence: int) -> int:
        return self.doorbells_offset + 8 * (sequence % self.num_slots)

    def slot_offset(self, slot: int) -> int:
        return self.slots_offset + slot * self.slot_bytes

    def cancel_offset(self, slot: int) -> int:
        return self.cancels_offset + 4 * slot

    def slot_status_offset(self, slot: int) -> int:
        return self.status_offset + slot * SLOT_STATUS.dtype.itemsize

    def token_offset(self, index: int) -> int:
        return self.tokens_offset + TOKEN_ENTRY.dtype.itemsize * (index % self.token_ring_entries)


def control_offset(field: str) -> int:
    return C_CONSTANTS["kControlOffset"] + CONTROL.offset(field)


def doorbell_word(sequence: int, session: int, slot: int) -> int:
    return (sequence & 0xFFFFFFFF) << 32 | (session & 0xFFFF) << 16 | slot


def write_identity(port_memory: np.ndarray, geometry: Geometry, port: int, epoch: int) -> None:
    """Fill the identity line of a zeroed port (u8 array of geometry.port_bytes)."""
    line = port_memory[: IDENTITY.dtype.itemsize].view(IDENTITY.dtype)[0]
    line["version"], line["port"], line["epoch"] = VERSION, port, epoch
    line["layout_hash"] = layout_hash()
    line["num_slots"], line["slot_bytes"] = geometry.num_slots, geometry.slot_bytes
    line["token_ring_entries"] = geometry.token_ring_entries
    line["max_context"], line["vocab_size"] = geometry.max_context, geometry.vocab_size
    line["magic"] = MAGIC  # last: a reader that sees it sees the rest
