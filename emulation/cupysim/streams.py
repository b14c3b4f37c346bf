"""Streams, events and graph capture in the device process, over the native executor."""

from __future__ import annotations

from dataclasses import dataclass, field

from emulation.cupysim import errors
from emulation.cupysim.errors import CUDARuntimeError
from emulation.cupysim.executor import Executor

Clock = dict[int, int]  # stream id -> number of its captured operations that are ordered before

NULL_STREAM = 0


@dataclass(slots=True)
class Capture:
    """A graph being captured. Operations keep the order of their calls, which satisfies every
    dependency that streams and events express; clocks only prove that forks were joined."""

    origin: int
    graph: int
    clocks: dict[int, Clock] = field(default_factory=dict)


@dataclass(slots=True)
class Stream:
    native: int
    non_blocking: bool
    capture: Capture | None = None


@dataclass(slots=True)
class Event:
    native: int
    capture: Capture | None = None  # recorded last inside this capture
    clock: Clock = field(default_factory=dict)


class Streams:
    """All streams and events of the device. Calls are made under the server's lock."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._streams = {NULL_STREAM: Stream(executor.start_stream(), non_blocking=False)}
        self._events: dict[int, Event] = {}
        self._last_id = 1  # 1 is CUDA's handle of the legacy default stream
        forgotten = executor.start_stream()
        executor.set_forget_stream(forgotten)
        self._internal = [forgotten]

    def natives(self) -> list[int]:
        return [stream.native for stream in self._streams.values()] + self._internal

    def __contains__(self, stream_id: int) -> bool:
        return stream_id in self._streams

    def stream(self, stream_id: int) -> Stream:
        try:
            return self._streams[stream_id]
        except KeyError:
            raise CUDARuntimeError(errors.INVALID_HANDLE, f"no stream {stream_id}") from None

    def event(self, event_id: int) -> Event:
        try:
            return self._events[event_id]
        except KeyError:
            raise CUDARuntimeError(errors.INVALID_HANDLE, f"no event {event_id}") from None

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def create(self, non_blocking: bool) -> int:
        stream_id = self._next_id()
        self._streams[stream_id] = Stream(self._executor.start_stream(), non_blocking)
        return stream_id

    def destroy(self, stream_id: int) -> None:
        """What is queued still runs."""
        if stream_id == NULL_STREAM:
            return
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            self._executor.stream_close(stream.native)

    # ---- enqueueing -----------------------------------------------------------------------

    def enqueue(self, stream_id: int, operation: int) -> None:
        """Appends to the stream, or to the graph that it captures."""
        stream = self.stream(stream_id)
        if stream.capture is not None:
            self._executor.graph_append(stream.capture.graph, operation)
            clock = stream.capture.clocks[stream_id]
            clock[stream_id] = clock.get(stream_id, 0) + 1
            return
        self.push(stream_id, operation)

    def push(self, stream_id: int, operation: int) -> None:
        """Appends to the stream itself, whether it captures or not."""
        stream = self.stream(stream_id)
        self._wait_as_legacy(stream_id, stream)
        self._executor.stream_push(stream.native, operation)

    def _wait_as_legacy(self, stream_id: int, stream: Stream) -> None:
        """The null stream and the blocking streams wait for each other."""
        if stream.non_blocking:
            return
        if stream_id == NULL_STREAM:
            others = [s for s in self._streams.values() if s is not stream and not s.non_blocking]
        else:
            others = [self._streams[NULL_STREAM]]
        for other in others:
            if not self._idle(other):
                wait = self._executor.op_wait_stream(other.native)
                self._executor.stream_push(stream.native, wait)

    def _idle(self, stream: Stream) -> bool:
        completed: int = self._executor.stream_completed(stream.native)
        return completed >= int(self._executor.stream_pushed(stream.native))

    def idle(self, stream_id: int) -> bool:
        stream = self.stream(stream_id)
        self.refuse_in_capture(stream_id, "query")
        if stream_id == NULL_STREAM:
            return all(self._idle(s) for s in self._streams.values() if not s.non_blocking)
        return self._idle(stream)

    def refuse_in_capture(self, stream_id: int, what: str) -> None:
        if self.stream(stream_id).capture is not None:
            raise CUDARuntimeError(
                errors.CAPTURE_UNSUPPORTED, f"{what} of a stream that is being captured"
            )

    # ---- events ---------------------------------------------------------------------------

    def create_event(self) -> int:
        event_id = self._next_id()
        self._events[event_id] = Event(self._executor.event_create())
        return event_id

    def destroy_event(self, event_id: int) -> None:
        event = self._events.pop(event_id, None)
        if event is not None:
            self._executor.event_destroy(event.native)

    def record(self, event_id: int, stream_id: int) -> None:
        event, stream = self.event(event_id), self.stream(stream_id)
        event.capture = stream.capture
        if stream.capture is not None:
            event.clock = dict(stream.capture.clocks[stream_id])
        else:
            self.push(stream_id, self._executor.op_record(event.native))

    def wait_event(self, event_id: int, stream_id: int) -> None:
        event, stream = self.event(event_id), self.stream(stream_id)
        if stream.capture is not event.capture and stream.capture is not None:
            raise CUDARuntimeError(
                errors.CAPTURE_ISOLATION, "a captured stream waits for an event from outside"
            )
        if event.capture is None:
            self.push(stream_id, self._executor.op_wait_event(event.native))
            return
        stream.capture = event.capture  # the fork of a capture
        clock = event.capture.clocks.setdefault(stream_id, {})
        for other, count in event.clock.items():
            clock[other] = max(clock.get(other, 0), count)

    def event_done(self, event_id: int) -> bool:
        return bool(self._executor.event_done(self.event(event_id).native))

    def elapsed_ms(self, start_id: int, end_id: int) -> float:
        start = int(self._executor.event_time_ns(self.event(start_id).native))
        end = int(self._executor.event_time_ns(self.event(end_id).native))
        if start < 0 or end < 0:
            raise CUDARuntimeError(
                errors.NOT_READY, "both events must be recorded and done to measure time"
            )
        return (end - start) / 1e6

    # ---- capture --------------------------------------------------------------------------

    def begin_capture(self, stream_id: int) -> None:
        stream = self.stream(stream_id)
        self.refuse_in_capture(stream_id, "begin_capture")
        graph = self._executor.graph_create()
        stream.capture = Capture(stream_id, graph, {stream_id: {}})

    def end_capture(self, stream_id: int) -> int:
        """Handle of the executable graph."""
        capture = self.stream(stream_id).capture
        if capture is None or capture.origin != stream_id:
            raise CUDARuntimeError(
                errors.CAPTURE_INVALIDATED, "end_capture without begin_capture on this stream"
            )
        for stream in self._streams.values():
            if stream.capture is capture:
                stream.capture = None
        for event in self._events.values():
            if event.capture is capture:
                event.capture = None
        seen = capture.clocks[stream_id]
        for other, clock in capture.clocks.items():
            if seen.get(other, 0) < clock.get(other, 0):
                self._executor.graph_discard(capture.graph)
                raise CUDARuntimeError(
                    errors.CAPTURE_UNJOINED,
                    "a stream that joined the capture was not joined back by an event",
                )
        handle: int = self._executor.graph_instantiate(capture.graph)
        if handle == 0:
            self._executor.graph_discard(capture.graph)
            raise CUDARuntimeError(errors.INVALID_VALUE, "too many graphs are alive")
        return handle

    def is_capturing(self, stream_id: int) -> bool:
        return self.stream(stream_id).capture is not None
