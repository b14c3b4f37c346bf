"""Graphs of one pass each, launched by the host: what the host-driven paths run on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np
import torch
from cuda.bindings import runtime as cudart

from engine.control.host_driven import StepSet
from engine.device.cuda import CSRC, checked, load_module
from engine.scheduler_memory import SchedulerMemory, device_pointer

TEAM_SIZE = 1024  # threads of the kernels around the pass


class PassGraphs:
    """`launch(step_set, index, stream)` enqueues a packet's pass; see PassLauncher.

    launch_pass(bucket) enqueues a forward pass for at most `bucket` tokens on torch's current
    stream. `memory` is the scheduler's, on the host: its table of graphs is filled in, so that
    plans name one; `device_memory` the pass's.
    """

    def __init__(
        self,
        memory: SchedulerMemory,
        device_memory: SchedulerMemory,
        launch_pass: Callable[[int], None],
        buckets: Sequence[int],
    ) -> None:
        module = load_module(CSRC / "host_driven.cu")
        self._open, self._close = (module.get_function(f"{one}_pass") for one in ("open", "close"))
        self._state = np.uint64(device_pointer(device_memory.state))
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._torch_graphs: list[torch.cuda.CUDAGraph] = []
        self._executables = [self._build(launch_pass, bucket) for bucket in buckets]
        memory.word("num_graphs")[0] = 1 + len(buckets)
        memory.word("graph_tokens")[1 : 1 + len(buckets)] = buckets

    def _build(self, launch_pass: Callable[[int], None], bucket: int) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            launch_pass(bucket)  # compiles and makes handles: the plan is empty, nothing is done
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, stream=self._stream):
            launch_pass(bucket)
        self._torch_graphs.append(graph)  # owns the memory that its kernels use
        executable = checked(
            "cudaGraphInstantiateWithFlags", cudart.cudaGraph_t(graph.raw_cuda_graph()), 0
        )
        checked("cudaGraphUpload", executable, self._stream.cuda_stream)
        self._stream.synchronize()
        return executable

    def launch(self, one: StepSet, index: int, stream: Any) -> None:
        """Packet, pass and answer, in order, on `stream` (CuPy's)."""
        packet = np.uint64(one.device_packet.data.ptr)
        answer = np.uint64(one.device_answer.data.ptr)
        with stream:
            self._open((1,), (TEAM_SIZE,), (self._state, packet, answer))
            checked("cudaGraphLaunch", self._executables[index - 1], stream.ptr)
            self._close((1,), (TEAM_SIZE,), (self._state, answer))


def pinned_zeros(shape: int, dtype: Any) -> np.ndarray:
    """Host memory that the GPU copies from and to without staging."""
    dtype = np.dtype(dtype)
    memory = cupy.cuda.alloc_pinned_memory(shape * dtype.itemsize)
    array = np.frombuffer(memory, dtype, shape)
    array[:] = 0
    return array
