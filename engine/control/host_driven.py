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
from typing import Any, Protocol

import numpy as np

from engine import state
from engine.host_scheduler import scheduler_library
from engine.protocol import MAX_LOGPROBS, EngineState
from engine.scheduler_memory import SchedulerMemory
from engine.state import TIMELINE_STEPS, Command
from engine.timeline import Event

SPIN_S = 0.01  # after the last work the idle loop looks without pause for so long, as the device's
NAPS_S = ((5.0, 10e-6), (float("inf"), 50e-6))  # then with these pauses
STALLED_S = 10e-6  # work is there, but token rings are full
EVENTS_PER_STEP = 5
DEPTHS = {"sync": 1, "async": 2}
"""Passes under way at once."""
HALTED = (EngineState.STOPPED, EngineState.FATAL)


MakeArray = Callable[[int, Any], np.ndarray]
"""Zeroed host memory that the device can copy from and to: (length, dtype)."""


class StepSet:
    """The buffers of one pass: plan and rows on the host, packet and answer on both sides."""

    def __init__(
        self, xp: Any, memory: SchedulerMemory, packet_bytes: int, zeros: MakeArray
    ) -> None:
        rows = len(memory.arrays["rows"])
        self.plan = np.zeros(1, state.PLAN.dtype)
        self.rows = np.zeros(rows, state.ROW.dtype)
        self.packet = zeros(packet_bytes, np.uint8)
        # Times, results, and the alternatives of each: 8 bytes each.
        self.answer = zeros(2 + rows + rows * MAX_LOGPROBS, np.uint64)
        self.device_packet = xp.zeros(packet_bytes, np.uint8)
        self.device_answer = xp.zeros(len(self.answer), np.uint64)
        self._num_results = 2 + rows
        self._answer_head = self.answer[: self._num_results]
        self._device_answer_head = self.device_answer[: self._num_results]
        self.uploaded: Any = xp.cuda.Event(disable_timing=True)
        self.computed: Any = xp.cuda.Event(disable_timing=True)

    def fetch_answer(self, stream: Any) -> None:
        """Copy the answer to the host; alternatives only where a row wants them."""
        if not self.plan[0]["num_with_alternatives"]:
            self._device_answer_head.get(stream=stream, out=self._answer_head)
            return
        end = self._num_results + MAX_LOGPROBS * int(self.plan[0]["num_rows"])
        self.device_answer[:end].get(stream=stream, out=self.answer[:end])


class PassLauncher(Protocol):
    """What the device has for the host to launch."""

    def launch(self, one: StepSet, index: int, stream: Any) -> None:
        """Enqueue on `stream`: apply the set's packet, one pass, make the answer. index: the plan's
        graph, from 1.
        """


class CapturedPass:
    """One graph for each set of buffers: the kernels around the pass, and the pass."""

    def __init__(
        self, xp: Any, device: SchedulerMemory, module: Any, launch_pass: Callable[[], None]
    ) -> None:
        self._xp, self._device, self._launch_pass = xp, device, launch_pass
        self._open, self._close = (module.get_function(f"{one}_pass") for one in ("open", "close"))
        self._graphs: dict[int, Any] = {}

    def launch(self, one: StepSet, index: int, stream: Any) -> None:
        """See PassLauncher; there is one size of pass."""
        if id(one) not in self._graphs:
            self._graphs[id(one)] = self._capture(one)
        self._graphs[id(one)].launch(stream)

    def _capture(self, one: StepSet) -> Any:
        stream = self._xp.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            self._open((1,), (1,), (self._device.state, one.device_packet, one.device_answer))
            self._launch_pass()
            self._close((1,), (1,), (self._device.state, one.device_answer))
            return stream.end_capture()


class HostDrivenLoop:
    """One engine, driven from a thread of this process.

    memory: the scheduler's, on the host. launcher: the device's part. depth: passes under way, 1
    for `sync`, 2 for `async`. zeros: makes the host's side of the buffers.
    """

    def __init__(
        self,
        xp: Any,
        memory: SchedulerMemory,
        launcher: PassLauncher,
        *,
        depth: int,
        zeros: MakeArray = np.zeros,
    ) -> None:
        self._memory, self._launcher = memory, launcher
        self._library = scheduler_library()
        self._scheduler = ctypes.c_void_p(memory.state.ctypes.data)
        packet_bytes = int(self._library.bb_packet_bytes(self._scheduler))
        self._compute = xp.cuda.Stream(non_blocking=True)
        self._upload = self._compute if depth == 1 else xp.cuda.Stream(non_blocking=True)
        self._download = self._compute if depth == 1 else xp.cuda.Stream(non_blocking=True)
        self._free = deque(StepSet(xp, memory, packet_bytes, zeros) for _ in range(depth))
        self._under_way: deque[StepSet] = deque()
        self._events: deque[Event] = deque(maxlen=EVENTS_PER_STEP * TIMELINE_STEPS)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="host-driven-loop", daemon=True)

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
        began_ns = time.monotonic_ns()
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
        self._note("host", "publish and plan" if done else "plan", following, began_ns)
        self._launch(self._free.popleft())
        return True

    def _note(
        self, lane: str, name: str, one: StepSet, start_ns: int, end_ns: int | None = None
    ) -> None:
        """An event of the step that `one` holds, up to now unless it ended before."""
        plan = one.plan[0]
        self._events.append(
            Event(
                lane,
                name,
                start_ns,
                time.monotonic_ns() if end_ns is None else end_ns,
                int(plan["step"]),
                int(plan["num_tokens"]),
                int(plan["num_rows"]),
            )
        )

    def _launch(self, one: StepSet) -> None:
        """Upload, pass and the mark after it, each on its stream."""
        began_ns = time.monotonic_ns()
        num_bytes = self._library.bb_pack(
            self._scheduler, one.plan.ctypes.data, one.rows.ctypes.data, one.packet.ctypes.data
        )
        one.device_packet[:num_bytes].set(one.packet[:num_bytes], stream=self._upload)
        self._note("upload", "upload", one, began_ns)
        began_ns = time.monotonic_ns()
        if self._upload is not self._compute:
            one.uploaded.record(self._upload)
            self._compute.wait_event(one.uploaded)
        self._launcher.launch(one, int(one.plan[0]["graph"]), self._compute)
        one.computed.record(self._compute)
        self._note("host", "launch", one, began_ns)
        self._under_way.append(one)

    def _settle(self) -> StepSet:
        """Wait for the oldest pass and take its answer; its set is free again."""
        one = self._under_way.popleft()
        began_ns = time.monotonic_ns()
        one.computed.synchronize()
        one.fetch_answer(self._download)
        started_ns, ended_ns = one.answer[:2].tolist()
        self._note("device", "pass", one, started_ns, ended_ns)
        # Asked for earlier, it waits for the pass.
        self._note("download", "download", one, max(began_ns, ended_ns))
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

    def timeline(self) -> list[Event]:
        """The last steps as this loop saw them, passes by the device's clock."""
        return list(self._events)
