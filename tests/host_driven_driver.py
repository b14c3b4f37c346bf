"""The host-driven loop on a device of our own making, one step at a time, for property tests.

The fake device runs a launched graph at once, or as late as it may: when its answer is asked for.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from engine.config import RingConfig, SchedulerConfig
from engine.control.host_driven import DEPTHS, CapturedPass, HostDrivenLoop
from engine.host_scheduler import scheduler_library
from engine.ring import RingClient
from engine.scheduler_memory import ModelLimits, SchedulerMemory
from tests.scheduler_driver import Driver

TURNS_TO_SETTLE = 4  # a new session waits for the samples in flight


class FakeArray(np.ndarray):
    """A device array: bytes of this process."""

    def set(self, values: np.ndarray, stream: Any = None) -> None:
        self[...] = values

    def get(self, stream: Any = None, out: Any = None) -> None:
        FakeStream.drain()
        out[...] = self


class FakeStream:
    """Records while capturing; launched graphs wait in one queue."""

    queue: list[list[Callable[[], None]]] = []  # noqa: RUF012 - one device
    recorded: list[Callable[[], None]] | None = None
    is_eager: Callable[[], bool]

    def __init__(self, non_blocking: bool = False) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def begin_capture(self) -> None:
        FakeStream.recorded = []

    def end_capture(self) -> Any:
        parts, FakeStream.recorded = FakeStream.recorded or [], None
        return SimpleNamespace(launch=lambda stream: FakeStream.launch(parts))

    def wait_event(self, event: Any) -> None:
        pass

    @classmethod
    def enqueue(cls, part: Callable[[], None]) -> None:
        assert cls.recorded is not None
        cls.recorded.append(part)

    @classmethod
    def launch(cls, parts: list[Callable[[], None]]) -> None:
        cls.queue.append(parts)
        if cls.is_eager():
            cls.drain()

    @classmethod
    def drain(cls) -> None:
        while cls.queue:
            for part in cls.queue.pop(0):
                part()


class FakeEvent:
    def __init__(self, disable_timing: bool = False) -> None:
        pass

    def record(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        FakeStream.drain()


def zeros(shape: int, dtype: Any) -> Any:
    return np.zeros(shape, dtype).view(FakeArray)


FAKE_XP = SimpleNamespace(zeros=zeros, cuda=SimpleNamespace(Stream=FakeStream, Event=FakeEvent))


class FakeModule:
    """The kernels around the pass, on a device whose memory is `device`."""

    def __init__(self, device: SchedulerMemory) -> None:
        self._device = device

    def get_function(self, name: str) -> Callable[..., None]:
        function: Callable[..., None] = getattr(self, name)
        return function

    def open_pass(self, grid: Any, block: Any, arguments: tuple[Any, ...]) -> None:
        _, packet, answer = arguments
        state = ctypes.c_void_p(self._device.state.ctypes.data)

        def run() -> None:
            answer[0] = 1
            scheduler_library().bb_apply_packet(state, packet.ctypes.data)

        FakeStream.enqueue(run)

    def close_pass(self, grid: Any, block: Any, arguments: tuple[Any, ...]) -> None:
        _, answer = arguments

        def run() -> None:
            arrays = self._device.arrays
            results = np.concatenate([arrays["results"], arrays["alternatives"].ravel()])
            answer[2:] = results.view(np.uint64)
            answer[1] = 2

        FakeStream.enqueue(run)


def void(value: object) -> None:
    """For a function whose value is not wanted."""


class OneStep(HostDrivenLoop):
    """Does not wait for work."""

    def _wait_for_work(self) -> None:
        pass


class HostDrivenDriver(Driver):
    """As Driver, with the loop of `path` ("sync", "async") between scheduler and model."""

    def __init__(
        self, ring: RingConfig, scheduler: SchedulerConfig, path: str, rng: random.Random
    ) -> None:
        self._path, self._rng = path, rng
        FakeStream.queue.clear()
        FakeStream.is_eager = lambda: rng.random() < 0.5
        self.loop: HostDrivenLoop | None = None
        super().__init__(ring, scheduler)

    def make_model_memory(self, ring: RingConfig, model: ModelLimits) -> SchedulerMemory:
        window = np.zeros(self.memory.window.size, np.uint8)
        device = SchedulerMemory(np, window, ring, self.config, model, 1)
        self._device = device
        return device

    def _make_loop(self) -> HostDrivenLoop:
        def launch_pass() -> None:
            FakeStream.enqueue(lambda: void(self.forward()))

        depth = DEPTHS[self._path]
        module = FakeModule(self._device)
        launcher = CapturedPass(FAKE_XP, self._device, module, launch_pass)
        return OneStep(FAKE_XP, self.memory, launcher, depth=depth)

    def connect(self, port: int) -> RingClient:
        def on_session() -> None:
            for _ in range(TURNS_TO_SETTLE):
                self.step()

        self.links[port].on_session = on_session
        return RingClient(self.links[port])

    def step(self) -> None:
        if self.loop is None:
            self.loop = self._make_loop()
        self.loop._step()
        self.num_steps += 1
        assert self.state["error"] == 0, "free + used pages != all pages"
        ports = self.memory.arrays["ports"]
        unread = ports["token_tail"] - ports["consumer_index"]
        assert (unread + ports["in_flight"] <= self.memory.geometry.token_ring_entries).all()
