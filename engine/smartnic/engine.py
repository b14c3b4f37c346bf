"""The front end's side of the device: admission, the table of choices in flight, life and death."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from engine.link import LinkError
from engine.ring import RingClient, RingFull, SlotTimes, Snapshot
from engine.smartnic.choice import Choice, Timing
from engine.smartnic.errors import ApiError, draining, engine_lost, overloaded
from engine.smartnic.health import Health
from engine.smartnic.metrics import Metrics, Sample
from engine.smartnic.poller import Poller, Row

WATCH_S = 0.2
LOOK_TIMEOUT_S = 1.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 1.0  # between two tries to connect anew

logger = logging.getLogger("blinkbed.smartnic")


class Engine:
    """Owns the ring. Every method runs in the event loop's thread.

    A slot belongs to a choice from `submit` until the device's terminal entry, whatever happened
    to the client in between. heartbeat_timeout_s: see Health. reconnect: makes a new client of the
    same window once the link is lost (it blocks, in a thread, and raises where that does not work
    yet). Requests in flight then have failed: none is executed twice.
    """

    def __init__(
        self,
        ring: RingClient,
        heartbeat_timeout_s: float,
        reconnect: Callable[[], RingClient] | None = None,
    ) -> None:
        self._ring = ring
        self._health = Health(heartbeat_timeout_s, time.monotonic())
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._reconnect = reconnect
        self._reconnecting: asyncio.Task[None] | None = None
        self._num_links_lost = 0
        self._choices: list[Choice | None] = [None] * ring.geometry.num_slots
        self._num_live = 0
        self._num_reserved = 0
        self._most_live = 0
        self._num_stale = 0
        self._lost: str | None = None
        self._snapshot: Snapshot | None = None
        self._looking: asyncio.Task[None] | None = None
        self._poller: Poller | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.draining = False
        self.metrics = Metrics(self._samples)

    # ---- life

    def start(self) -> None:
        """Begin to read tokens and to watch the heartbeat; needs the running loop."""
        self._start_poller()
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def _start_poller(self) -> None:
        loop = asyncio.get_running_loop()
        self._poller = Poller(self._ring, loop, self._deliver, self._link_failed)

    def close(self) -> None:
        """Stop both and close the ring; idempotent."""
        for task in (self._watcher, self._reconnecting, self._looking):
            if task is not None:
                task.cancel()
        if self._poller is not None:
            self._poller.close()
        self._ring.close()

    async def _watch(self) -> None:
        while True:
            if self._reconnecting is None:
                # Judged by what it saw, unless it takes long: over a link that is being lost.
                await asyncio.wait({self._look()}, timeout=WATCH_S)
            self._judge()
            await asyncio.sleep(WATCH_S)

    def _look(self) -> asyncio.Task[None]:
        """Read a snapshot, beside the event loop; one at a time."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._take_snapshot())
        return self._looking

    async def _take_snapshot(self) -> None:
        ring = self._ring
        try:
            snapshot = await asyncio.to_thread(ring.snapshot)
        except Exception as error:
            if ring is self._ring:
                self._link_failed(error)
        else:
            if ring is self._ring:
                self._snapshot = snapshot
                beats = snapshot.heartbeat + snapshot.pass_beat
                self._health.observe(beats, snapshot.state, time.monotonic())
                self._judge()

    def link_facts(self) -> dict[str, Any]:
        """The link as this side sees it, for /server_info."""
        info = self._ring.link.info
        return {
            "link_kind": info.kind,
            "link_description": info.description,
            "links_lost": self._num_links_lost,
            "window": info.window,
            "epoch": self._ring.address.epoch,
        }

    async def refresh(self) -> None:
        """Bring the device's counters up to date, if it answers within LOOK_TIMEOUT_S."""
        if self._lost is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._look()), LOOK_TIMEOUT_S)

    def _link_failed(self, error: Exception) -> None:
        self._health.link_failed(str(error) or type(error).__name__)
        self._judge()
        if self._reconnect is not None and self._reconnecting is None:
            self._num_links_lost += 1
            logger.warning("link lost: %s; connecting anew", error)
            self._reconnecting = asyncio.get_running_loop().create_task(self._replace_link())

    async def _replace_link(self) -> None:
        """A new link and a new session, with capped back-off; the old one's requests are gone."""
        assert self._reconnect is not None
        if self._poller is not None:
            await asyncio.to_thread(self._poller.close)
        await asyncio.to_thread(self._ring.close)
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                self._ring = await asyncio.to_thread(self._reconnect)
                break
            except Exception as error:  # whatever it is: who stops trying is never ready again
                logger.warning("not connected yet: %s", error)
                self._health.link_failed(str(error) or type(error).__name__)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        self._choices = [None] * self._ring.geometry.num_slots
        self._num_live = 0
        self._health = Health(self._heartbeat_timeout_s, time.monotonic())
        self._start_poller()
        self._reconnecting = None
        self._judge()
        logger.warning("connected again: %s", self._ring.link.info.description)

    def _judge(self) -> None:
        before, self._lost = self._lost, self._health.lost_reason(time.monotonic())
        if self._lost is not None and before is None:
            self.fail_all(engine_lost(self._lost))

    def fail_all(self, error: ApiError) -> None:
        """End every request for its client; the slots wait for the device, should it come back."""
        for choice in self._choices:
            if choice is not None and choice.finish_reason is None:
                choice.reply.fail(error)
                choice.close("error")
                self._finished(choice)
                self._cancel(choice)

    # ---- admission

    def unready_reason(self) -> str | None:
        """Why nothing would be served now, or None."""
        return "draining" if self.draining else self._lost

    @property
    def num_live(self) -> int:
        """Slots in use."""
        return self._num_live

    @property
    def num_unfinished(self) -> int:
        """Choices whose client still waits."""
        return sum(c is not None and c.finish_reason is None for c in self._choices)

    @contextlib.contextmanager
    def reserve(self, num_choices: int) -> Iterator[None]:
        """Hold slots while the prompts are tokenized; raises the 503 that a client gets without."""
        if self.draining:
            raise draining()
        if self._lost is not None:
            raise engine_lost(self._lost)
        if self._ring.num_free_slots - self._num_reserved < num_choices:
            raise overloaded()
        self._num_reserved += num_choices
        try:
            yield
        finally:
            self._num_reserved -= num_choices

    def submit(self, choice: Choice) -> None:
        """Put one choice on the device; raises ApiError 503 when that cannot be done."""
        choice.submitted_ns = time.monotonic_ns()
        try:
            ticket = self._ring.submit(choice.params, choice.prompt_ids)
        except RingFull:
            raise overloaded() from None
        except LinkError as error:
            self._link_failed(error)
            raise engine_lost(f"the link failed: {error}") from None
        choice.ticket = ticket
        self._choices[ticket.slot] = choice
        self._num_live += 1
        self._most_live = max(self._most_live, self._num_live)
        if self._poller is not None:
            self._poller.resume()

    def abandon(self, choice: Choice) -> None:
        """The client left: the device need not go on."""
        if choice.finish_reason is None:
            choice.close("abort")
            self._finished(choice)
            self._cancel(choice)

    def _cancel(self, choice: Choice) -> None:
        if choice.ticket is not None and self._reconnecting is None:
            try:
                self._ring.cancel(choice.ticket)
            except LinkError as error:
                self._link_failed(error)

    # ---- tokens

    def _deliver(self, rows: list[Row], times: dict[int, SlotTimes]) -> None:
        if self._reconnecting is not None:
            return  # of a session that is over
        choices = self._choices
        for _, slot, generation, token, logprob, kind, reason, _ in rows:
            choice = choices[slot] if slot < len(choices) else None
            if choice is None or choice.ticket is None or choice.ticket.generation != generation:
                self._num_stale += 1
                continue
            was_open = choice.finish_reason is None
            if choice.push(token, kind, reason, logprob):
                self._cancel(choice)
            if reason:
                self._release(choice, times[slot])
            if was_open and choice.finish_reason is not None:
                self._finished(choice)
        self._health.tokens_arrived(time.monotonic())

    def _release(self, choice: Choice, times: SlotTimes) -> None:
        """The device is done with a choice."""
        ticket = choice.ticket
        assert ticket is not None
        choice.timing = _timing(choice, times)
        if choice.timing.queue_ms is not None:
            self.metrics.queue_time.observe(choice.timing.queue_ms / 1e3)
        self._choices[ticket.slot] = None
        self._num_live -= 1
        self._ring.release(ticket)
        if self._num_live == 0 and self._poller is not None:
            self._poller.park()

    def _finished(self, choice: Choice) -> None:
        """The client's part of a choice is over."""
        metrics = self.metrics
        metrics.success.labels(choice.finish_reason).inc()
        if choice.ticket is None:
            return
        metrics.latency.observe((choice.finished_ns - choice.submitted_ns) / 1e9)
        if choice.num_tokens:
            first_ns = choice.first_token_ns
            metrics.time_to_first_token.observe((first_ns - choice.submitted_ns) / 1e9)
            if choice.num_tokens > 1:
                span_ns = choice.finished_ns - first_ns
                metrics.time_per_output_token.observe(span_ns / 1e9 / (choice.num_tokens - 1))

    # ---- metrics

    def _samples(self) -> Iterator[Sample]:
        yield Sample("gauge", "ring_slots_used", "Slots in use.", self._num_live)
        yield Sample("gauge", "ring_slots_total", "Slots of the ring.", len(self._choices))
        yield Sample("gauge", "ring_slots_used_max", "High-water mark.", self._most_live)
        yield Sample("counter", "stale_entries", "Entries of no live request.", self._num_stale)
        age_s = self._health.age_s(time.monotonic())
        yield Sample("gauge", "heartbeat_age_seconds", "Age of the last life sign.", age_s)
        yield Sample("gauge", "ready", "1 if requests are served.", self.unready_reason() is None)
        yield Sample("counter", "links_lost", "Links lost.", self._num_links_lost)
        if self._snapshot is not None:
            yield from _device_samples(self._snapshot)


def _span_ms(start_ns: int, end_ns: int) -> float | None:
    if not start_ns or not end_ns:
        return None
    return round((end_ns - start_ns) / 1e6, 3)


def _timing(choice: Choice, times: SlotTimes) -> Timing:
    assert choice.ticket is not None
    if times.generation != choice.ticket.generation:
        return Timing()
    to_first_ms = _span_ms(choice.submitted_ns, choice.first_token_ns)
    on_device_ms = _span_ms(times.picked_up_ns, times.first_token_ns)
    link_ms = None
    if to_first_ms is not None and on_device_ms is not None:
        link_ms = round(max(0.0, to_first_ms - on_device_ms), 3)
    return Timing(
        queue_ms=_span_ms(times.picked_up_ns, times.admitted_ns),
        prefill_ms=_span_ms(times.admitted_ns, times.first_token_ns),
        decode_ms=_span_ms(times.first_token_ns, times.finished_ns),
        link_ms=link_ms,
        preemptions=times.num_preemptions,
    )


def _device_samples(s: Snapshot) -> Iterator[Sample]:
    used = s.total_pages - s.free_pages
    share = used / s.total_pages if s.total_pages else 0.0
    yield Sample("gauge", "num_requests_running", "Requests in the running batch.", s.num_running)
    yield Sample("gauge", "num_requests_waiting", "Requests that wait.", s.num_waiting)
    yield Sample("gauge", "kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", share)
    yield Sample("gauge", "kv_pages_free", "KV pages free.", s.free_pages)
    yield Sample("gauge", "kv_pages_total", "KV pages.", s.total_pages)
    yield Sample("counter", "num_preemptions", "Preemptions.", s.num_preemptions)
    yield Sample("counter", "prompt_tokens", "Prompt tokens computed.", s.prompt_tokens)
    yield Sample("counter", "generation_tokens", "Tokens generated.", s.generation_tokens)
    yield Sample("counter", "engine_steps", "Steps of the device.", s.num_steps)
    yield Sample("counter", "engine_step_seconds", "Time inside steps.", s.step_ns / 1e9)
    yield Sample("counter", "engine_gap_seconds", "Time between steps with work.", s.gap_ns / 1e9)
    yield Sample("counter", "engine_idle_seconds", "Time without work.", s.idle_ns / 1e9)
    yield Sample("counter", "pace_late_steps", "Steps off their pace.", s.pace_late_steps)
    yield Sample("counter", "pace_late_seconds", "By so much.", s.pace_late_ns / 1e9)
    yield Sample("counter", "records_accepted", "Records taken.", s.records_accepted)
    yield Sample("counter", "records_rejected", "Records refused.", s.records_rejected)
    yield Sample("counter", "records_torn", "Looks at records not yet whole.", s.records_torn)
    yield Sample("counter", "doorbells_refused", "Doorbells of no free slot.", s.doorbells_refused)
    yield Sample("counter", "pickup_seconds", "Doorbell seen to record whole.", s.pickup_ns / 1e9)
    yield Sample("counter", "token_ring_stalls", "Sequence-steps paused.", s.ring_stalls)
