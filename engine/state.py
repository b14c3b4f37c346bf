"""The scheduler's own memory on the device, and the tables of a step.

A sequence's id is its global slot number: port * slots_per_port + slot. Arrays indexed by it have
`num_seqs` rows. Nothing here is remotely reachable.
"""

from __future__ import annotations

import enum

from engine.layout import Struct
from engine.protocol import COUNTERS

MAX_EOS_IDS = 8
MAX_GRAPHS = 16
TIMELINE_STEPS = 4096


class Command(enum.IntEnum):
    """Written by the host into `Scheduler.command`; honoured at the next step or idle poll."""

    RUN = 0
    DRAIN = 1  # refuse new records, finish what is there, then stop
    STOP = 2  # end everything with ERROR_SHUTDOWN, then stop


class RowFlag(enum.IntFlag):
    SAMPLE = 1  # the row's last token completes what is known: sample the next one
    ALTERNATIVES = 2  # the num_logprobs likeliest tokens are wanted with the one that is sampled
    SUPPRESS_STOP = 4  # fewer than min_tokens so far: EOS and stop ids must not be sampled


class Terminal(enum.IntEnum):
    """How far the last entry of a sequence is."""

    NONE = 0
    NOW = 1  # it is the token that is published now
    WRITTEN = 2
    HELD = 3  # the last token is known; it waits for a sample planned too many
    RELEASED = 4  # the held token is published now


class SchedulerError(enum.IntEnum):
    NONE = 0
    PAGE_ACCOUNTING = 1  # free + used pages != total, or a page has two owners
    GRAPH_LAUNCH = 2


PLAN = Struct(
    "Plan",
    32,
    ("num_rows", "i4"),
    ("num_tokens", "i4"),
    ("num_decode_rows", "i4"),  # the first rows, one token each
    ("num_sampled", "i4"),
    ("step", "u8"),
    ("graph", "i4"),
    ("num_with_alternatives", "i4"),  # rows
)

ROW = Struct(
    "Row",
    64,
    ("seq", "i4"),
    ("query_start", "i4"),  # first token of the row in the packed token axis
    ("num_tokens", "i4"),
    ("first_position", "i4"),
    ("flags", "u4"),  # RowFlag
    ("temperature", "f4"),
    ("top_p", "f4"),
    ("min_p", "f4"),
    ("top_k", "i4"),
    ("uniform", "f4"),  # [0, 1): Philox4x32-10, key = seed, counter = position
    ("repetition_penalty", "f4"),
    ("frequency_penalty", "f4"),
    ("presence_penalty", "f4"),
    ("num_prompt_tokens", "i4"),
    ("num_logprobs", "i4"),
    # Of the record's biases, and of its stop ids while they must not be sampled: how many there
    # are. 0, as nearly always: the sampler does not look at the record.
    ("num_adjusted", "i4"),
)

RESULT = Struct("Result", 8, ("token", "i4"), ("logprob", "f4"))

STEP_RECORD = Struct(
    "StepRecord",
    40,
    ("turn_ns", "u8"),  # when the turn began that planned the pass
    ("started_ns", "u8"),
    ("ended_ns", "u8"),
    ("step", "u8"),
    ("num_tokens", "i4"),
    ("num_rows", "i4"),
)

SEQUENCE = Struct(
    "Sequence",
    128,
    ("state", "u4"),  # protocol.SlotState
    ("generation", "u4"),
    ("num_tokens", "i4"),  # known ids in history: prompt + generated
    ("num_prompt", "i4"),
    ("num_computed", "i4"),  # positions whose KV is, or is being, computed
    ("pending", "i4"),  # planned samples whose token is not known yet
    ("num_pages", "i4"),
    ("max_total", "i4"),  # prompt + max_tokens
    ("min_total", "i4"),  # prompt + min_tokens
    ("priority", "i4"),
    ("flags", "u4"),  # protocol.RequestFlag
    ("finish_reason", "u4"),  # protocol.FinishReason, NONE while alive
    ("terminal_written", "u4"),  # Terminal
    ("num_preemptions", "u4"),
    ("script_start", "i4"),  # scripted model only
    ("script_length", "i4"),
    ("arrival", "u8"),
    ("sequence", "u8"),  # the doorbell's
    ("deadline_ns", "u8"),  # SUSPECT: when to give up
    ("picked_up_ns", "u8"),
    ("admitted_ns", "u8"),
    ("first_token_ns", "u8"),
    ("finished_ns", "u8"),
    ("held_logprob", "f4"),  # of the last token, while terminal_written is HELD
    ("num_entries", "i4"),  # of the token ring that a token of it may take, alternatives included
)

PORT = Struct(
    "Port",
    256,
    ("next_sequence", "u8"),
    ("token_tail", "u8"),
    ("consumer_index", "u8"),
    ("cancel_count", "u8"),
    ("session", "u4"),
    ("room", "i4"),  # token ring entries that this step may still claim
    ("in_flight", "i4"),  # entries claimed for samples that are not yet published
    ("reserved0", "u4"),
    ("cancels_until_ns", "u8"),  # how long to look at the cancel words again
    ("reserved", "u4", 2),
    ("counters", "u8", COUNTERS.dtype.itemsize // 8),
)

SCHEDULER = Struct(
    "Scheduler",
    640,
    # Configuration, constant after start.
    ("num_ports", "i4"),
    ("slots_per_port", "i4"),
    ("num_seqs", "i4"),
    ("num_pages", "i4"),
    ("page_size", "i4"),
    ("max_running", "i4"),
    ("max_step_tokens", "i4"),
    ("max_context", "i4"),
    ("max_pages_per_seq", "i4"),
    ("vocab_size", "i4"),
    ("chunked_prefill", "i4"),
    ("token_ring_entries", "i4"),
    ("max_pickups", "i4"),  # doorbells taken per port and step
    ("num_graphs", "i4"),
    ("debug", "i4"),
    ("slot_bits", "i4"),  # log2(slots_per_port)
    ("page_bits", "i4"),  # log2(page_size)
    ("num_eos", "i4"),
    ("eos", "i4", MAX_EOS_IDS),
    ("epoch", "u8"),
    ("port_bytes", "u8"),
    ("slot_bytes", "u8"),
    ("cancels_offset", "u8"),
    ("slots_offset", "u8"),
    ("status_offset", "u8"),
    ("tokens_offset", "u8"),
    ("torn_timeout_ns", "u8"),
    # Arrays in device memory.
    ("window", "*uint8_t"),
    ("records", "*uint8_t"),  # private copies, [num_seqs][slot_bytes]
    ("sequences", "*Sequence"),
    ("ports", "*Port"),
    ("history", "*int32_t"),  # [num_seqs][max_context]
    ("block_tables", "*int32_t"),  # [num_seqs][max_pages_per_seq]
    ("free_pages", "*int32_t"),  # stack
    ("running", "*int32_t"),  # in order of admission
    ("waiting", "*int32_t"),  # last one is next
    ("ended", "*int32_t"),  # terminals that wait for room in the token ring
    ("suspects", "*int32_t"),
    ("marks", "*int32_t"),  # scratch, [max(2 * max_running, num_pages)]
    ("plan", "*Plan"),
    ("rows", "*Row"),
    ("results", "*Result"),
    ("alternatives", "*Result"),  # [max_running][kMaxLogprobs]; token -1: no more
    ("timeline", "*StepRecord"),  # [kTimelineSteps], a ring; null: not wanted
    ("graphs", "u8", MAX_GRAPHS),  # graph 0 polls; graph k takes up to graph_tokens[k] tokens
    ("graph_tokens", "i4", MAX_GRAPHS),
    # Words of the host.
    ("command", "u4"),
    ("reserved0", "u4"),
    # What changes.
    ("state", "u4"),  # protocol.EngineState
    ("error", "u4"),  # SchedulerError
    ("num_free_pages", "i4"),
    ("num_running", "i4"),
    ("num_waiting", "i4"),
    ("num_ended", "i4"),
    ("num_suspects", "i4"),
    ("preempted", "i4"),  # in this step
    ("arrivals", "u8"),
    ("heartbeat", "u8"),
    ("step", "u8"),
    ("planned_ns", "u8"),  # when the step in flight was planned; 0: none
    ("returned_ns", "u8"),  # when the scheduler last began to look
    ("shown_ns", "u8"),  # when the progress lines were last written
    ("busy_ns", "u8"),  # when there last was something to do
    ("must_drain", "i4"),  # no new pass before those in flight are settled: a preemption waits
    ("had_work", "i4"),  # host-driven paths: was there more to do when the last pass was settled?
    ("num_recorded", "u8"),  # steps written to the timeline
    ("reserved", "u8", 4),
)

C_STRUCTS = [PLAN, ROW, RESULT, STEP_RECORD, SEQUENCE, PORT, SCHEDULER]
C_ENUMS = [Command, Terminal, SchedulerError]
C_CONSTANTS = {
    "kMaxEosIds": MAX_EOS_IDS,
    "kMaxGraphs": MAX_GRAPHS,
    "kTimelineSteps": TIMELINE_STEPS,
    "kRowSample": int(RowFlag.SAMPLE),
    "kRowAlternatives": int(RowFlag.ALTERNATIVES),
    "kRowSuppressStop": int(RowFlag.SUPPRESS_STOP),
}
