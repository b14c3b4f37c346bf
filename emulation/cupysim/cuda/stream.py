"""cupy.cuda.Stream and Event over the device process."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

from emulation.cupysim import client as client_module

if TYPE_CHECKING:
    from emulation.cupysim.cuda.graph import Graph


class Event:
    """A point in a stream's work. `block` and `disable_timing` make no difference here."""

    def __init__(
        self, block: bool = False, disable_timing: bool = False, interprocess: bool = False
    ) -> None:
        if interprocess:
            raise ValueError("events of cupysim cannot be shared between processes")
        self._client = client_module.current()
        self.ptr: int = self._client.request("event_create")

    def __del__(self) -> None:
        if hasattr(self, "ptr"):
            self._client.discard("event_destroy", self.ptr)

    @property
    def done(self) -> bool:
        return bool(self._client.request("event_done", self.ptr))

    def record(self, stream: Stream | None = None) -> None:
        self._client.post(
            "event_record", self.ptr, current_stream_ptr() if stream is None else stream.ptr
        )

    def synchronize(self) -> None:
        self._client.request("event_sync", self.ptr)


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Milliseconds between two events that are done."""
    return float(client_module.current().request("elapsed", start_event.ptr, end_event.ptr))


class Stream:
    """A FIFO of device work. The null stream and blocking streams wait for each other."""

    null: ClassVar[Stream]

    def __init__(
        self,
        null: bool = False,
        non_blocking: bool = False,
        ptds: bool = False,
        priority: int | None = None,
    ) -> None:
        if ptds:
            raise ValueError("cupysim has no per-thread default stream")
        self.device_id = 0
        self.is_non_blocking = non_blocking
        self.ptr = 0
        if not null:
            self._client = client_module.current()
            self.ptr = int(self._client.request("stream_create", non_blocking))

    def __del__(self) -> None:
        if getattr(self, "ptr", 0):
            self._client.discard("stream_destroy", self.ptr)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __repr__(self) -> str:
        return f"<Stream {self.ptr} (device 0)>"

    def __enter__(self) -> Stream:
        _stack().append(_current.stream)
        _current.stream = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _current.stream = _stack().pop()

    def use(self) -> Stream:
        """Makes this the calling thread's current stream."""
        _current.stream = self
        return self

    @property
    def done(self) -> bool:
        return bool(client_module.current().request("stream_done", self.ptr))

    def synchronize(self) -> None:
        client_module.current().request("sync", self.ptr)

    def record(self, event: Event | None = None) -> Event:
        if event is None:
            event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        # Waits for the reply: a wait that a capture forbids is the caller's error, not the
        # device's.
        client_module.current().request("event_wait", event.ptr, self.ptr)

    def begin_capture(self, mode: int | None = None) -> None:
        if self.ptr == 0:
            raise RuntimeError("cannot capture on the default (legacy) stream")
        client_module.current().request("begin_capture", self.ptr)

    def end_capture(self) -> Graph:
        from emulation.cupysim.cuda.graph import Graph

        return Graph.of_handle(int(client_module.current().request("end_capture", self.ptr)))

    def is_capturing(self) -> bool:
        return bool(client_module.current().request("is_capturing", self.ptr))


Stream.null = Stream(null=True)


class _Current(threading.local):
    def __init__(self) -> None:
        self.stream = Stream.null
        self.stack: list[Stream] = []


_current = _Current()


def _stack() -> list[Stream]:
    return _current.stack


def get_current_stream(device_id: int = -1) -> Stream:
    return _current.stream


def current_stream_ptr() -> int:
    return _current.stream.ptr
