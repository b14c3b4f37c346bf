"""Drives the compiled scheduler, and its twin beside it, with a fake model whose KV cache is real.

The fake model keeps in the KV cache, at each position, a hash of everything up to there, made from
the hash before it and read through the block tables. The next token is the last hash: a token
doubled, lost or put into another's page changes all that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.config import RingConfig, SchedulerConfig
from engine.host_scheduler import HostScheduler
from engine.link.shm import SharedMemoryLink
from engine.model.adjustments import NOTHING, read_adjustments
from engine.protocol import (
    TOKEN_ENTRY,
    EngineState,
    EntryKind,
    FinishReason,
    control_offset,
)
from engine.reference import Entry, ReferenceScheduler
from engine.ring import RequestParams, RingClient, Ticket
from engine.scheduler_memory import ModelLimits, SchedulerMemory
from engine.state import ROW, Command, RowFlag

VOCAB_SIZE = 61
EOS_ID = 7
MASK = (1 << 48) - 1


def mix(before: int, token: int) -> int:
    """The fake model's state after one more token."""
    return ((before ^ token + 1) * 0x5851F42D4C957F2D + 0x14057B7EF767814F) >> 7 & MASK


def next_token(state: int, suppress_stop: bool, stops: set[int], shift: int) -> int:
    """shift: what the biases add up to: the fake model shows them so."""
    token = ((state >> 16) + shift) % VOCAB_SIZE
    while suppress_stop and token in stops:
        token = (token + 1) % VOCAB_SIZE
    return token


def answer(params: RequestParams, prompt: Sequence[int]) -> tuple[list[int], FinishReason]:
    """What the request must get, whatever else happens on the device."""
    state, tokens = 0, list[int]()
    for token in prompt:
        state = mix(state, token)
    stops = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS_ID})
    shift = sum(token * int(bias) for token, bias in params.logit_bias)
    while True:
        early = len(tokens) < min(params.min_tokens, params.max_tokens)
        token = next_token(state, early, {EOS_ID, *params.stop_token_ids}, shift)
        tokens.append(token)
        if token in stops and not early:
            return tokens, FinishReason.STOP
        if len(tokens) == params.max_tokens:
            return tokens, FinishReason.LENGTH
        state = mix(state, token)


def likeliest(state: int, num_logprobs: int) -> list[int]:
    """The fake model's alternatives; at times it has fewer than asked for."""
    count = max(num_logprobs, 0) if state % 3 else min(num_logprobs, 1)
    return [((state >> 8) + 5 * k) % VOCAB_SIZE for k in range(count)]


def alternatives_of(params: RequestParams, prompt: Sequence[int]) -> list[list[int]]:
    """Of each token of the answer."""
    state, alternatives = 0, list[list[int]]()
    for token in prompt:
        state = mix(state, token)
    for token in answer(params, prompt)[0]:
        alternatives.append(likeliest(state, params.num_logprobs))
        state = mix(state, token)
    return alternatives


class TestLink(SharedMemoryLink):
    """Hands out `limit` entries at a time; the device answers at once to a new session."""

    __test__ = False
    limit = 1 << 30
    on_session: Callable[[], None]

    def write(self, chain: Sequence[tuple[int, bytes]]) -> None:
        super().write(chain)
        if chain[-1][0] == control_offset("session"):
            self.on_session()

    def read_tokens(self, head: int, timeout_s: float) -> np.ndarray:
        return super().read_tokens(head, timeout_s)[: self.limit]


@dataclass
class Asked:
    """One request as its client sees it."""

    port: int
    ticket: Ticket
    params: RequestParams
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    alternatives: list[list[int]] = field(default_factory=lambda: [[]])  # the last ones: to come
    reason: FinishReason = FinishReason.NONE
    is_cancelled: bool = False


class Driver:
    """A scheduler, a client at each port, and the fake model. `with_twin` compares every step."""

    def __init__(
        self,
        ring: RingConfig,
        scheduler: SchedulerConfig,
        *,
        with_twin: bool = False,
        step: Callable[[int], None] | None = None,
    ) -> None:
        model = ModelLimits(VOCAB_SIZE, scheduler.max_context, (EOS_ID,))
        self.config = scheduler
        self.host = HostScheduler(ring, scheduler, model)
        self.memory = self.host.memory
        self.model_memory = self.make_model_memory(ring, model)
        self._step = step
        self.twin = ReferenceScheduler(ring, scheduler, model) if with_twin else None
        self.kv = np.zeros(scheduler.num_pages * scheduler.page_size, np.int64)
        self.params: dict[int, RequestParams] = {}
        self.live: list[dict[int, Asked]] = [{} for _ in range(ring.num_ports)]
        self.done: list[Asked] = []
        self.error_rows: set[int] = set()  # sequences for which the model fails
        self.uniforms: dict[tuple[int, int], float] = {}
        self.num_steps = 0
        self.trace: list[bytes] = []
        self._tails = [0] * ring.num_ports
        self.links = [
            TestLink(self.host.port(p), self.memory.geometry, "test") for p in range(ring.num_ports)
        ]
        self.clients = [self.connect(p) for p in range(ring.num_ports)]

    def make_model_memory(self, ring: RingConfig, model: ModelLimits) -> SchedulerMemory:
        """Where the model finds plan, rows, history and tables: the scheduler's own."""
        return self.memory

    # ---- The SmartNIC's side -------------------------------------------------------------------
    def connect(self, port: int) -> RingClient:
        """A new SmartNIC takes the port over."""

        def on_session() -> None:
            if self.twin:
                self.twin.open_session(port)
            self.step()

        self.links[port].on_session = on_session
        return RingClient(self.links[port])

    def restart(self, port: int) -> None:
        """The SmartNIC dies and comes back, knowing nothing of what it asked for."""
        self.live[port].clear()
        self.clients[port] = self.connect(port)

    def ask(self, params: RequestParams, prompt: Sequence[int], port: int = 0) -> Asked:
        ticket = self.clients[port].submit(params, prompt)
        asked = Asked(port, ticket, params, tuple(prompt))
        if self.twin:
            self.twin.post(port, ticket, params, prompt)
        self.live[port][ticket.slot] = asked
        self.params[port * self.memory.geometry.num_slots + ticket.slot] = params
        return asked

    def cancel(self, asked: Asked) -> None:
        asked.is_cancelled = True
        self.clients[asked.port].cancel(asked.ticket)
        if self.twin:
            self.twin.cancel(asked.port, asked.ticket)

    def read(self, port: int = 0, limit: int = 1 << 30) -> None:
        """Consume up to `limit` entries, and hold them against what must be."""
        client = self.clients[port]
        self.links[port].limit = limit
        if limit:
            for entry in client.read_tokens(0):
                self._take(port, entry)
        if self.twin:
            self.twin.consume(port, client._head)

    def _take(self, port: int, entry: Any) -> None:
        asked = self.live[port][int(entry["slot"])]  # KeyError: a token after the terminal
        assert entry["generation"] == asked.ticket.generation
        assert (entry["kind"] == EntryKind.END) == (entry["token"] < 0)
        if entry["kind"] == EntryKind.TOKEN:
            asked.tokens.append(int(entry["token"]))
            asked.alternatives.append([])
        elif entry["kind"] == EntryKind.ALTERNATIVE:
            asked.alternatives[-1].append(int(entry["token"]))
            assert entry["finish_reason"] == FinishReason.NONE
            assert entry["logprob"] == -len(asked.alternatives[-1])
        asked.reason = FinishReason(int(entry["finish_reason"]))
        if asked.reason != FinishReason.NONE:
            del self.live[port][asked.ticket.slot]
            self.clients[port].release(asked.ticket)
            self.done.append(asked)

    def command(self, command: Command) -> None:
        self.memory.word("command")[0] = command
        if self.twin:
            self.twin.command = command

    # ---- The device's side ---------------------------------------------------------------------
    @property
    def state(self) -> Any:
        return self.memory.state[0]

    @property
    def rows(self) -> np.ndarray:
        rows: np.ndarray = self.memory.arrays["rows"][: self.memory.arrays["plan"][0]["num_rows"]]
        return rows

    def forward(self) -> tuple[list[int], list[list[int]]]:
        """Run the fake model over the planned rows; tokens and alternatives of who samples."""
        tokens, alternatives = [], []
        arrays = self.model_memory.arrays
        history, tables = arrays["history"], arrays["block_tables"]
        size = self.config.page_size
        for index, row in enumerate(arrays["rows"][: arrays["plan"][0]["num_rows"]]):
            seq, first, count = int(row["seq"]), int(row["first_position"]), int(row["num_tokens"])

            def place(position: int, table: np.ndarray = tables[seq]) -> int:
                return int(table[position // size]) * size + position % size

            state = int(self.kv[place(first - 1)]) if first else 0
            for position in range(first, first + count):
                state = mix(state, int(history[seq, position]))
                self.kv[place(position)] = state
            token, others = -1, list[int]()
            if row["flags"] & RowFlag.SAMPLE:
                token = self.sample(row, state)
                if seq in self.error_rows:
                    token = -1
                history[seq, first + count] = token
                self.uniforms[seq, first + count] = float(row["uniform"])
                if row["flags"] & RowFlag.ALTERNATIVES:
                    others = likeliest(state, int(row["num_logprobs"]))
                    ranked = [*others, -1][: int(row["num_logprobs"])]
                    for k, other in enumerate(ranked):
                        arrays["alternatives"][index, k] = (other, -1.0 - k)
            arrays["results"][index] = (token, 0.0)
            tokens.append(token)
            alternatives.append(others)
        return tokens, alternatives

    def sample(self, row: Any, state: int) -> int:
        """The fake model's token; it looks at the record as samplers do, and where they do."""
        adjustments = NOTHING
        if row["num_adjusted"]:
            records = self.model_memory.arrays["records"].reshape(self.memory.num_seqs, -1)
            adjustments = read_adjustments(records[int(row["seq"])])
        shift = int(adjustments.bias_ids.astype(np.int64) @ adjustments.biases.astype(np.int64))
        suppress = bool(row["flags"] & RowFlag.SUPPRESS_STOP)
        return next_token(state, suppress, {EOS_ID, *adjustments.stop_ids.tolist()}, shift)

    def step(self) -> None:
        results = self.forward()
        if self._step:
            self._step(self.memory.state.ctypes.data)
        else:
            self.host.step()
        self.num_steps += 1
        assert self.state["error"] == 0, "free + used pages != all pages"
        self._check_plan()
        if self.twin:
            self.twin.step(*results)
            self._compare(self.twin)

    def _check_plan(self) -> None:
        plan, rows = self.memory.arrays["plan"][0], self.rows
        decodes = int(plan["num_decode_rows"])
        assert len(rows) <= self.config.max_running
        assert plan["num_tokens"] == rows["num_tokens"].sum() <= self.config.max_step_tokens
        assert (rows["num_tokens"][:decodes] == 1).all()
        assert (rows["num_tokens"][decodes:] >= 1).all()
        assert plan["num_sampled"] == ((rows["flags"] & RowFlag.SAMPLE) > 0).sum()
        assert plan["num_with_alternatives"] == ((rows["flags"] & RowFlag.ALTERNATIVES) > 0).sum()
        assert (rows["query_start"] == np.cumsum(rows["num_tokens"]) - rows["num_tokens"]).all()
        assert len(set(rows["seq"].tolist())) == len(rows)
        ports = self.memory.arrays["ports"]
        unread = ports["token_tail"] - ports["consumer_index"]
        assert (unread + ports["in_flight"] <= self.memory.geometry.token_ring_entries).all()

    def _list(self, name: str) -> list[int]:
        values: list[int] = self.memory.arrays[name][: self.state[f"num_{name}"]].tolist()
        return values

    def _compare(self, twin: ReferenceScheduler) -> None:
        num_slots = self.memory.geometry.num_slots
        assert self.rows.tobytes() == expected_rows(twin).tobytes()
        for name in ("free_pages",):
            assert self._list(name) == twin.free_pages
        for name, requests in (
            ("running", twin.running),
            ("waiting", twin.waiting),
            ("ended", twin.ended),
        ):
            assert self._list(name) == [r.port * num_slots + r.ticket.slot for r in requests], name
        for request in twin.running:
            seq = request.port * num_slots + request.ticket.slot
            table = self.memory.arrays["block_tables"][seq]
            assert table[: len(request.pages)].tolist() == request.pages
            history = self.memory.arrays["history"][seq]
            assert history[: len(request.tokens)].tolist() == request.tokens
        for index, port in enumerate(twin.ports):
            device = self.memory.arrays["ports"][index]
            assert device["token_tail"] == len(port.log)
            assert device["consumer_index"] == port.consumer_index
            assert (device["room"], device["in_flight"]) == (port.room, port.in_flight)
            for at in range(self._tails[index], len(port.log)):
                assert self.entry(index, at) == port.log[at], at
            self._tails[index] = len(port.log)

    def entry(self, port: int, index: int) -> Any:
        """One entry of a token ring as the twin would write it."""
        start = self.memory.geometry.token_offset(index)
        raw = self.host.port(port)[start : start + TOKEN_ENTRY.dtype.itemsize]
        e = raw.view(TOKEN_ENTRY.dtype)[0]
        assert e["sequence"] == index + 1
        return Entry(
            int(e["slot"]),
            int(e["generation"]),
            int(e["token"]),
            EntryKind(int(e["kind"])),
            FinishReason(int(e["finish_reason"])),
        )

    def run(self, max_steps: int) -> None:
        """Read and step until nothing is asked any more and the device is idle."""
        for _ in range(max_steps):
            for port in range(len(self.clients)):
                self.read(port)
            if not any(self.live) and self.is_idle():
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps: {self.live}")

    def is_idle(self) -> bool:
        s = self.state
        names = ("num_running", "num_waiting", "num_ended", "num_suspects")
        if any(s[name] for name in names):
            return False
        return bool(s["num_free_pages"] == s["num_pages"])

    def check_answers(self) -> None:
        """Whoever ended got its own tokens: all of them, or a prefix if it was ended early."""
        for asked in self.done:
            tokens, reason = answer(asked.params, asked.prompt)
            alternatives = alternatives_of(asked.params, asked.prompt)[: len(asked.tokens)]
            assert asked.alternatives == [*alternatives, []]
            if asked.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert (asked.tokens, asked.reason) == (tokens, reason)
            else:
                assert asked.tokens == tokens[: len(asked.tokens)]
                assert len(asked.tokens) < len(tokens)
                assert asked.is_cancelled or asked.reason != FinishReason.CANCELLED

    @property
    def engine_state(self) -> EngineState:
        return EngineState(int(self.state["state"]))


def expected_rows(twin: ReferenceScheduler) -> np.ndarray:
    """The twin's rows in the device's layout."""
    rows = np.zeros(len(twin.rows), ROW.dtype)
    for to, row, request in zip(rows, twin.rows, twin._planned, strict=True):
        for name in (
            "seq",
            "query_start",
            "num_tokens",
            "first_position",
            "flags",
            "uniform",
            "num_adjusted",
        ):
            to[name] = getattr(row, name)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "top_k",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
            "num_logprobs",
        ):
            to[name] = getattr(request.params, name)
        to["num_prompt_tokens"] = len(request.prompt)
    return rows
