"""The scheduler as one would explain it: readable twin of engine/csrc/scheduler.cuh and step.cuh.

Plain lists and dataclasses, one request after the other. It starts from validated requests instead
of records in the ring, and is told as events what the C++ reads from the window. The same events
and results give the same plans, token ring entries, page stack, and queue orders; a property test
drives both. A step: publish what the last forward pass sampled, poll, admit, plan the next pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.config import RingConfig, SchedulerConfig
from engine.protocol import EntryKind, FinishReason
from engine.ring import RequestParams, Ticket
from engine.scheduler_memory import MAX_PICKUPS, ModelLimits
from engine.state import Command, RowFlag


def philox_uniform(seed: int, position: int) -> float:
    """A draw in [0, 1): Philox4x32-10 (Salmon et al., SC 2011), key = seed, counter = position."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = position & mask, 0, 0, 0
    k0, k1 = seed & mask, seed >> 32 & mask
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & mask, (p0 >> 32) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return (c0 >> 8) / (1 << 24)


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step; `seq` is port * num_slots + slot."""

    seq: int
    query_start: int
    num_tokens: int
    first_position: int
    flags: RowFlag
    uniform: float
    num_adjusted: int  # biases, and stop ids that must not be sampled


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a token ring; token -1: none."""

    slot: int
    generation: int
    token: int
    kind: EntryKind
    finish_reason: FinishReason


@dataclass(eq=False, slots=True)
class Request:
    """A request on the device: what was asked, and how far it is."""

    port: int
    ticket: Ticket
    params: RequestParams
    prompt: Sequence[int]
    arrival: int = 0
    tokens: list[int] = field(default_factory=list)  # known ids: prompt, then generated
    num_computed: int = 0  # positions whose KV is, or is being, computed
    is_pending: bool = False  # a sample is planned whose token is not known yet
    pages: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NONE
    is_terminal_written: bool = False

    @property
    def length(self) -> int:
        return len(self.tokens) + self.is_pending

    @property
    def remaining(self) -> int:
        """Known tokens whose KV is still to be computed: 1 for a decode."""
        return self.length - self.num_computed

    @property
    def num_generated(self) -> int:
        return self.length - len(self.prompt)

    @property
    def num_entries(self) -> int:
        """Of the token ring that a token of it may take: its alternatives come with it."""
        return 1 + max(self.params.num_logprobs, 0)

    def finish(self, reason: FinishReason) -> None:
        if self.finish_reason == FinishReason.NONE:
            self.finish_reason = reason

    def order(self) -> tuple[int, int]:
        """Smaller is served first. A preempted request keeps its arrival."""
        return self.params.priority, self.arrival


@dataclass(slots=True)
class Port:
    """What one SmartNIC worker wrote and reads."""

    doorbells: list[Request] = field(default_factory=list)
    cancelled: set[Ticket] = field(default_factory=set)
    log: list[Entry] = field(default_factory=list)  # the token ring without its bounds
    consumer_index: int = 0
    has_new_session: bool = False
    room: int = 0  # entries that this step may still claim
    in_flight: int = 0  # entries claimed for samples that are not yet published


class ReferenceScheduler:
    """The twin. Between two steps call the events, then `step` with the tokens of the last plan."""

    def __init__(self, ring: RingConfig, scheduler: SchedulerConfig, model: ModelLimits) -> None:
        self.ring, self.config, self.model = ring, scheduler, model
        self.ports = [Port() for _ in range(ring.num_ports)]
        self.free_pages = list(range(scheduler.num_pages - 1, -1, -1))  # page 0 on top
        self.running: list[Request] = []  # in order of admission
        self.waiting: list[Request] = []  # sorted, the next to be served last
        self.ended: list[Request] = []  # their terminals wait for room in the token ring
        self.rows: list[Row] = []
        self.command = Command.RUN
        self._planned: list[Request] = []
        self._num_arrivals = 0

    # ---- Events: what the SmartNIC and the host write ------------------------------------------
    def post(self, port: int, ticket: Ticket, params: RequestParams, prompt: Sequence[int]) -> None:
        """A doorbell was rung for a whole and sound record."""
        self.ports[port].doorbells.append(Request(port, ticket, params, prompt))

    def cancel(self, port: int, ticket: Ticket) -> None:
        self.ports[port].cancelled.add(ticket)

    def consume(self, port: int, index: int) -> None:
        """The consumer index was written. One outside the log, or behind, changes nothing."""
        if self.ports[port].consumer_index <= index <= len(self.ports[port].log):
            self.ports[port].consumer_index = index

    def open_session(self, port: int) -> None:
        """Another SmartNIC took the port over; what the former one posted last was never rung."""
        self.ports[port].has_new_session = True
        self.ports[port].doorbells.clear()
        self.ports[port].cancelled.clear()

    # ---- A step --------------------------------------------------------------------------------
    def step(self, tokens: Sequence[int], alternatives: Sequence[Sequence[int]]) -> list[Row]:
        """`tokens` are the results of the last plan's rows (ignored where a row did not sample),
        `alternatives` what the model gave with each."""
        self._publish(tokens, alternatives)
        self._poll()
        self._admit()
        self._plan()
        return self.rows

    # ---- Publish -------------------------------------------------------------------------------
    def _publish(self, tokens: Sequence[int], alternatives: Sequence[Sequence[int]]) -> None:
        results = zip(self._planned, self.rows, tokens, alternatives, strict=True)
        for request, row, token, others in results:
            if RowFlag.SAMPLE in row.flags:
                self._settle(request, token, others)
        self._retire()

    def _settle(self, request: Request, token: int, alternatives: Sequence[int]) -> None:
        port = self.ports[request.port]
        request.is_pending = False
        port.in_flight -= request.num_entries
        if not 0 <= token < self.model.vocab_size:
            return request.finish(FinishReason.ERROR_MODEL)
        request.tokens.append(token)
        for other in alternatives:
            self._write(request, other, EntryKind.ALTERNATIVE)
        if self._is_stop(request, token):
            request.finish(FinishReason.STOP)
        elif request.num_generated == request.params.max_tokens:
            request.finish(FinishReason.LENGTH)
        request.is_terminal_written = request.finish_reason != FinishReason.NONE
        self._write(request, token, EntryKind.TOKEN)
        return None

    def _is_stop(self, request: Request, token: int) -> bool:
        params = request.params
        if request.num_generated <= min(params.min_tokens, params.max_tokens):
            return False
        is_eos = token in self.model.eos_ids and not params.ignore_eos
        return is_eos or token in params.stop_token_ids

    def _write(self, request: Request, token: int, kind: EntryKind) -> None:
        slot, generation = request.ticket.slot, request.ticket.generation
        entry = Entry(slot, generation, token, kind, request.finish_reason)
        self.ports[request.port].log.append(entry)

    def _retire(self) -> None:
        """Those that are over leave both lists and give their pages back."""
        for requests in (self.running, self.waiting):
            over = [r for r in requests if r.finish_reason != FinishReason.NONE]
            requests[:] = [r for r in requests if r.finish_reason == FinishReason.NONE]
            for request in over:
                self._free(request)
            self.ended += [r for r in over if not r.is_terminal_written]

    def _free(self, request: Request) -> None:
        self.free_pages += request.pages
        request.pages.clear()

    # ---- Poll ----------------------------------------------------------------------------------
    def _poll(self) -> None:
        for index, port in enumerate(self.ports):
            if port.has_new_session:
                self._change_session(index)
            unread = len(port.log) - port.consumer_index
            port.room = self.ring.token_ring_entries - unread - port.in_flight
            for request in self.running + self.waiting:
                if request.port == index and request.ticket in port.cancelled:
                    request.finish(FinishReason.CANCELLED)
        if self.command == Command.STOP:
            for request in self.running + self.waiting:
                request.finish(FinishReason.ERROR_SHUTDOWN)
        self._retire()
        for port in self.ports:
            for request in port.doorbells[:MAX_PICKUPS]:
                self._pick_up(request)
            del port.doorbells[:MAX_PICKUPS]
        self._flush_ended()

    def _change_session(self, index: int) -> None:
        port = self.ports[index]
        port.has_new_session = False
        port.consumer_index = len(port.log)
        for request in self.running + self.waiting:
            if request.port == index:
                request.finish(FinishReason.CANCELLED)
                request.is_terminal_written = True  # nobody is there to read it
        self.ended = [r for r in self.ended if r.port != index]
        self._retire()

    def _pick_up(self, request: Request) -> None:
        if self.command != Command.RUN:
            request.finish(FinishReason.ERROR_SHUTDOWN)
        elif request.ticket in self.ports[request.port].cancelled:
            request.finish(FinishReason.CANCELLED)
        if request.finish_reason != FinishReason.NONE:
            self.ended.append(request)
            return
        self._num_arrivals += 1
        request.arrival = self._num_arrivals
        request.tokens = list(request.prompt)
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        self.waiting.append(request)
        self.waiting.sort(key=Request.order, reverse=True)

    def _flush_ended(self) -> None:
        """Terminals without a token, as far as each token ring has room."""
        left = []
        for request in self.ended:
            if self.ports[request.port].room < 1:
                left.append(request)
            else:
                self.ports[request.port].room -= 1
                self._write(request, -1, EntryKind.END)
        self.ended = left

    # ---- Admit ---------------------------------------------------------------------------------
    def _is_paused(self, request: Request) -> bool:
        """Its token ring is too full for what it samples."""
        return self.ports[request.port].room < request.num_entries

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

    def _needs_page(self, request: Request) -> bool:
        short = self._pages_for(request.length) > len(request.pages)
        return request.remaining == 1 and short and not self._is_paused(request)

    def _admit(self) -> None:
        """Pages for the decodes that cross into a new one; then whoever waits, in order."""
        preempted = False
        while sum(map(self._needs_page, self.running)) > len(self.free_pages):
            self._preempt()
            preempted = True
        for request in filter(self._needs_page, self.running):
            request.pages.append(self.free_pages.pop())
        if not preempted:  # what was just freed belongs to those that run
            self._admit_waiting()

    def _preempt(self) -> None:
        """Back to the queue with the last served, those that pause first; its KV is recomputed."""
        victim = max(self.running, key=lambda r: (self._is_paused(r), r.order()))
        self.running.remove(victim)
        self._free(victim)
        victim.num_computed = 0
        self._enqueue(victim)

    def _fits(self, request: Request) -> bool:
        has_place = len(self.running) < self.config.max_running
        return has_place and self._pages_for(len(request.tokens)) <= len(self.free_pages)

    def _admit_waiting(self) -> None:
        tokens = sum(r.remaining for r in self.running if not self._is_paused(r))
        candidates = [r for r in reversed(self.waiting) if not self._is_paused(r)]
        if candidates and tokens < self.config.max_step_tokens:
            while not self._fits(candidates[0]) and any(map(self._is_paused, self.running)):
                self._preempt()
        for request in candidates:
            if tokens >= self.config.max_step_tokens or not self._fits(request):
                break
            tokens += len(request.tokens)
            self.waiting.remove(request)
            self.running.append(request)
            for _ in range(self._pages_for(len(request.tokens))):
                request.pages.append(self.free_pages.pop())

    # ---- Plan ----------------------------------------------------------------------------------
    def _plan(self) -> None:
        self.rows, self._planned = [], []
        self._write_rows(lambda request: int(request.remaining == 1))
        left = self.config.max_step_tokens - self._num_tokens

        # Prefill shares what the decodes left of the budget, in order of admission.
        chunks: dict[Request, int] = {}
        for request in self.running:
            remaining = request.remaining
            if remaining > 1 and not self._is_paused(request):
                may_run = self.config.chunked_prefill or left >= remaining
                chunks[request] = min(remaining, left) if may_run else 0
                left = max(left - remaining, 0)
        self._write_rows(lambda request: chunks.get(request, 0))

    @property
    def _num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    def _write_rows(self, num_tokens_of: Callable[[Request], int]) -> None:
        """Who finds no room for its sample holds back those of its port behind it."""
        wanted = {request: num_tokens_of(request) for request in self.running}
        room = [port.room for port in self.ports]
        for request, num_tokens in wanted.items():
            samples = num_tokens > 0 and num_tokens == request.remaining
            if samples:
                room[request.port] -= request.num_entries
            if num_tokens and not (samples and room[request.port] < 0):
                self._write_row(request, num_tokens, samples)

    def _write_row(self, request: Request, num_tokens: int, samples: bool) -> None:
        params, port = request.params, self.ports[request.port]
        flags, uniform, num_adjusted = RowFlag(0), 0.0, len(params.logit_bias)
        may_stop = request.num_generated >= min(params.min_tokens, params.max_tokens)
        if not may_stop:
            num_adjusted += len(params.stop_token_ids)
        if samples:
            flags |= RowFlag.SAMPLE
            if params.num_logprobs > 0:
                flags |= RowFlag.ALTERNATIVES
            if not may_stop:
                flags |= RowFlag.SUPPRESS_STOP
            if params.temperature > 0:
                uniform = philox_uniform(params.seed, request.length)
            port.room -= request.num_entries
            port.in_flight += request.num_entries
        seq = request.port * self.ring.num_slots + request.ticket.slot
        first = request.num_computed
        self.rows.append(
            Row(seq, self._num_tokens, num_tokens, first, flags, uniform, num_adjusted)
        )
        self._planned.append(request)
        request.num_computed += num_tokens
        request.is_pending = samples
