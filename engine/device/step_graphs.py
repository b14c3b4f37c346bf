"""Step graphs that launch each other from the device, with no host in between.

Graph 0 is the scheduler node alone; graph k is a pass of up to `buckets[k - 1]` tokens, then the
scheduler node, which tail-launches the next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import torch
from cuda.bindings import runtime as cudart

from engine.device.cuda import CSRC, checked, load_module
from engine.scheduler_memory import SchedulerMemory, device_pointer
from engine.state import MAX_GRAPHS, Command
from engine.timeline import Event, device_events

TEAM_SIZE = 256  # threads of the scheduler node
MOST_BUCKETS = MAX_GRAPHS - 1


# Steps of tokens for which graphs are made. A step runs as long as its bucket is wide, so they lie
# close together where prompts of usual lengths, with the decodes beside them, end up.
BUCKETS = (8, 16, 32, 64, 128, 192, 256, 384, 512, 576, 768, 1024, 1152, 1536)


def token_buckets(max_step_tokens: int) -> tuple[int, ...]:
    """Those below the budget, and the budget itself: at most MOST_BUCKETS."""
    return (*(size for size in BUCKETS if size < max_step_tokens), max_step_tokens)


class StepGraphs:
    """The persistent path on CUDA. `launch_pass(bucket)` enqueues a forward pass with sampling
    for at most `bucket` tokens on torch's current stream, reading the plan from device memory.
    """

    def __init__(
        self,
        memory: SchedulerMemory,
        launch_pass: Callable[[int], None],
        buckets: Sequence[int],
        kernel_source: Path = CSRC / "scheduler_kernel.cu",
    ) -> None:
        if not 1 <= len(buckets) <= MOST_BUCKETS:
            raise ValueError(f"there are 1 to {MOST_BUCKETS} step graphs, not {len(buckets)}")
        self._memory = memory
        self.stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._side = cupy.cuda.Stream(non_blocking=True)
        self.module = load_module(kernel_source, (CSRC, kernel_source.parent), device_launch=True)
        self._node = self.module.get_function("scheduler_node")
        self._pointer = np.uint64(device_pointer(memory.state))
        self._torch_graphs: list[torch.cuda.CUDAGraph] = []
        handles = [self._build(self._schedule)]
        for bucket in buckets:
            self._warm_up(launch_pass, bucket)
            handles.append(self._build(functools.partial(self._step, launch_pass, bucket)))
        self._executables = handles
        with self._side:
            memory.word("graphs")[: len(handles)] = cupy.asarray(
                np.array([int(handle) for handle in handles], np.uint64)
            )
            memory.word("graph_tokens")[1 : len(handles)] = cupy.asarray(
                np.array(buckets, np.int32)
            )
            memory.word("num_graphs").fill(len(handles))
        cupy.cuda.Device().synchronize()

    def _step(self, launch_pass: Callable[[int], None], bucket: int) -> None:
        launch_pass(bucket)
        self._schedule()

    def _schedule(self) -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            self._node((1,), (TEAM_SIZE,), (self._pointer,))

    def _warm_up(self, launch_pass: Callable[[int], None], bucket: int) -> None:
        """Compile and make handles outside of the capture: the plan is empty, nothing is done."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            launch_pass(bucket)
        self.stream.synchronize()

    def _build(self, body: Callable[[], Any]) -> Any:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, stream=self.stream):
            body()
        self._torch_graphs.append(graph)  # owns the memory that its kernels use
        executable = checked(
            "cudaGraphInstantiateWithFlags",
            cudart.cudaGraph_t(graph.raw_cuda_graph()),
            int(cudart.cudaGraphInstantiateFlags.cudaGraphInstantiateFlagDeviceLaunch),
        )
        checked("cudaGraphUpload", executable, self.stream.cuda_stream)
        self.stream.synchronize()
        return executable

    def start(self) -> None:
        """Launch the polling graph: from here on the device goes by itself."""
        checked("cudaGraphLaunch", self._executables[0], self.stream.cuda_stream)

    def command(self, command: Command) -> None:
        """Write the command word, honoured at the next step or idle poll."""
        with self._side:
            self._memory.word("command").set(np.array([int(command)], np.uint32))
        self._side.synchronize()

    def state(self) -> int:
        """The engine's state, read beside the loop."""
        with self._side:
            return int(self._memory.word("state").get()[0])

    def error(self) -> int:
        """The scheduler's error code (engine/state.py: SchedulerError)."""
        with self._side:
            return int(self._memory.word("error").get()[0])

    def timeline(self) -> list[Event]:
        """The last steps as the device wrote them down; none where it was not asked to."""
        records = self._memory.arrays.get("timeline")
        if records is None:
            return []
        with self._side:
            return device_events(records.get())
