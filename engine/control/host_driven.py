"""The host-driven paths: the host runs the scheduler, and launches every pass.

The same scheduler source, compiled for the host, works on the host's memory and on the window; the
device has only the pass. `sync` takes turns: while one works the other waits. `async` keeps two
passes under way with a set of buffers for each: while the device computes pass N, the host
publishes N - 1 and plans N + 1, whose unknown tokens the device finds in its own history, where
pass N writes them. Uploads, passes and downloads go over streams of their own, ordered by events.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from engine import state
from engine.host_scheduler import scheduler_library
from engine.protocol import EngineState
from engine.scheduler_memory import SchedulerMemory
from engine.state import Command

SPIN_S = 0.01  # after the last work the idle loop looks without pause for so long, as the device's
NAPS_S = ((5.0, 10e-6), (float("inf"), 50e-6))  # then with these pauses
STALLED_S = 10e-6  # work is there, but token rings are full
DEPTHS = {"sync": 1, "async": 2}
"""Passes under way at once."""
HALTED = (EngineState.STOPPED, EngineState.FATAL)


class StepSet:
    """The buffers of one pass: plan and rows on the host, packet and answer on both sides."""

    def __init__(self, xp: Any, memory: SchedulerMemory, packet_bytes: int) -> None:
        rows = len(memory.arrays["rows"])
        self.plan = np.zeros(1, state.PLAN.dtype)
        self.rows = np.zeros(rows, state.ROW.dtype)
        self.packet = np.zeros(packet_bytes, np.uint8)
        self.answer = np.zeros(2 + rows, np.uint64)  # times, then results, 8 bytes each
        self.device_packet = xp.zeros(packet_bytes, np.uint8)
        self.device_answer = xp.zeros(2 + rows, np.uint64)
        self.graph: Any = None
        self.uploaded: Any = xp.cuda.Event(disable_timing=True)
        self.computed: Any = xp.cuda.Event(disable_timing=True)


class HostDrivenLoop:
    """One engine, driven from a thread of this process.

    memory: the scheduler's, on the host. device: the pass's, on the device. launch_pass() enqueues
    one pass on the current stream. depth: passes under way, 1 for `sync`, 2 for `async`.
    """

    def __init__(
        self,
        xp: Any,
        memory: SchedulerMemory,
        device: SchedulerMemory,
        module: Any,
        launch_pass: Callable[[], None],
        *,
        depth: int,
    ) -> None:
        self._xp, self._memory, self._device = xp, memory, device
        self._library = scheduler_library()
        self._scheduler = ctypes.c_void_p(memory.state.ctypes.data)
        packet_bytes = int(self._library.bb_packet_bytes(self._scheduler))
        self._compute = xp.cuda.Stream(non_blocking=True)
        self._upload = self._compute if depth == 1 else xp.cuda.Stream(non_blocking=True)
        self._download = self._compute if depth == 1 else xp.cuda.Stream(non_blocking=True)
        self._free = deque(StepSet(xp, memory, packet_bytes) for _ in range(depth))
        self._under_way: deque[StepSet] = deque()
        for one in self._free:
            one.graph = self._capture(module, launch_pass, one)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="host-driven-loop", daemon=True)

    def _capture(self, module: Any, launch_pass: Callable[[], None], one: StepSet) -> Any:
        open_pass, close_pass = module.get_function("open_pass"), module.get_function("close_pass")
        with self._compute:
            self._compute.begin_capture()
            open_pass((1,), (1,), (self._device.state, one.device_packet, one.device_answer))
            launch_pass()
            close_pass((1,), (1,), (self._device.state, one.device_answer))
            return self._compute.end_capture()

    def start(self) -> None:
        """Let the thread run; returns at once."""
        self._thread.start()

    # ---- the loop

    def _run(self) -> None:
        try:
            while self._word("state") not in HALTED:
                self._step()
        except BaseException as error:
            self._failure = error
            self._memory.word("state")[0] = EngineState.FATAL
            self._library.bb_show(self._scheduler)
            raise

    def _step(self) -> None:
        """Plan a pass while another may be under way; settle the oldest when all sets are."""
        done = None
        if not self._free:
            done = self._settle()
        planned = self._turn(done)
        if not planned and self._under_way:
            planned = self._turn(self._settle())
        if not planned and not self._under_way:
            self._wait_for_work()

    def _turn(self, done: StepSet | None) -> bool:
        """Publish, poll, admit, plan; launch what was planned, and say whether anything was."""
        following = self._free[0]
        earlier = done or following
        started_ns, ended_ns = earlier.answer[:2].tolist()
        self._library.bb_turn(
            self._scheduler,
            done is not None,
            earlier.plan.ctypes.data,
            earlier.rows.ctypes.data,
            earlier.answer.ctypes.data + 16,
            started_ns,
            ended_ns,
            following.plan.ctypes.data,
            following.rows.ctypes.data,
        )
        if not following.plan[0]["num_rows"]:
            return False
        self._launch(self._free.popleft())
        return True

    def _launch(self, one: StepSet) -> None:
        """Upload, pass and the mark after it, each on its stream."""
        num_bytes = self._library.bb_pack(
            self._scheduler, one.plan.ctypes.data, one.rows.ctypes.data, one.packet.ctypes.data
        )
        one.device_packet[:num_bytes].set(one.packet[:num_bytes], stream=self._upload)
        if self._upload is not self._compute:
            one.uploaded.record(self._upload)
            self._compute.wait_event(one.uploaded)
        one.graph.launch(self._compute)
        if self._download is not self._compute:
            one.computed.record(self._compute)
            self._download.wait_event(one.computed)
        self._under_way.append(one)

    def _settle(self) -> StepSet:
        """Wait for the oldest pass and take its answer; its set is free again."""
        one = self._under_way.popleft()
        one.device_answer.get(stream=self._download, out=one.answer)
        self._free.append(one)
        return one

    def _wait_for_work(self) -> None:
        if self._library.bb_anything_new(self._scheduler):
            time.sleep(STALLED_S)
            return
        began_s = time.monotonic()
        while not self._library.bb_anything_new(self._scheduler):
            idle_s = time.monotonic() - began_s
            if idle_s > SPIN_S:
                time.sleep(next(nap_s for limit_s, nap_s in NAPS_S if idle_s < limit_s))
            self._library.bb_show(self._scheduler)

    # ---- from outside

    def command(self, command: Command) -> None:
        """Write the command word, honoured at the next turn or idle look."""
        self._memory.word("command")[0] = int(command)

    def _word(self, name: str) -> int:
        return int(self._memory.word(name)[0])

    def state(self) -> int:
        """The engine's state."""
        return self._word("state")

    def error(self) -> int:
        """The scheduler's error code (engine/state.py: SchedulerError)."""
        return self._word("error")
