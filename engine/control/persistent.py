"""The persistent path: the device drives itself.

Two graphs. Graph 0 is the scheduler node alone: it polls. Graph 1 is the model's pass, then the
scheduler node. Each ends in the scheduler node, which tail-launches the next. The host launches
graph 0 once and takes no further part; what it can still do is write the command word.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from engine.scheduler_memory import SchedulerMemory
from engine.state import Command
from engine.timeline import Event, device_events

CSRC = Path(__file__).parents[1] / "csrc"
IDLE_GRAPH, STEP_GRAPH = 0, 1


def kernel_module(xp: ModuleType, name: str = "scheduler_kernel") -> Any:
    """engine/csrc/`name`.cu, built for the device that `xp` drives."""
    code = (CSRC / f"{name}.cu").read_text()
    return xp.RawModule(code=code, options=("-std=c++17", f"-I{CSRC}"))


class PersistentLoop:
    """The step graphs of one scheduler. `launch_pass()` enqueues one forward pass with sampling on
    the current stream, reading plan and rows from device memory."""

    def __init__(
        self, xp: ModuleType, memory: SchedulerMemory, module: Any, launch_pass: Callable[[], None]
    ) -> None:
        self._xp, self._memory = xp, memory
        self._stream = xp.cuda.Stream(non_blocking=True)
        scheduler_node = module.get_function("scheduler_node")

        def capture(*parts: Callable[[], None]) -> Any:
            with self._stream:
                self._stream.begin_capture()
                for part in parts:
                    part()
                return self._stream.end_capture()

        def schedule() -> None:
            scheduler_node((1,), (1,), (memory.state,))

        self._graphs = [capture(schedule), capture(launch_pass, schedule)]
        handles = memory.word("graphs")
        handles[: len(self._graphs)] = xp.asarray(
            np.array([graph.graphExec for graph in self._graphs], np.uint64)
        )
        memory.word("num_graphs").fill(len(self._graphs))
        xp.cuda.Device().synchronize()

    def start(self) -> None:
        """Launch the polling graph: from here on the device goes by itself."""
        self._graphs[IDLE_GRAPH].launch(self._stream)

    def command(self, command: Command) -> None:
        """Write the command word, honoured at the next step or idle poll.

        It goes over a stream of its own, since the loop's stream never drains.
        """
        self._memory.word("command").fill(int(command))

    def state(self) -> int:
        """The engine's state, read beside the loop."""
        return int(self._xp.asnumpy(self._memory.word("state"))[0])

    def error(self) -> int:
        """The scheduler's error code (engine/state.py: SchedulerError)."""
        return int(self._xp.asnumpy(self._memory.word("error"))[0])

    def timeline(self) -> list[Event]:
        """The last steps as the device wrote them down; none where it was not asked to."""
        records = self._memory.arrays.get("timeline")
        return [] if records is None else device_events(self._xp.asnumpy(records))
