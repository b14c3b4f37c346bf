"""A real GPU: the loop runs in the CUDA context of the host process.

The host process may be stopped, and the GPU goes on by itself; when it ends, the context ends.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from engine import progress
from engine.config import STAGED, ServeConfig
from engine.control.host_driven import DEPTHS, HostDrivenLoop
from engine.device import Window
from engine.errors import UserError
from engine.model.source import ModelSource
from engine.model.spec import device_weights
from engine.scheduler_memory import SchedulerMemory, device_pointer

try:
    import cupy
    import torch

    from engine.device.cuda import (
        CSRC,
        CudaError,
        CudaLibrary,
        DeviceWindow,
        HostWindow,
        load_module,
    )
    from engine.device.pass_graphs import PassGraphs, pinned_zeros
    from engine.device.step_graphs import StepGraphs, token_buckets
    from engine.model.cuda_pass import CudaPass
    from engine.model.cuda_weights import Tensors, load_weights, random_device_weights
except ImportError as error:
    raise UserError(
        f"--device cuda needs CuPy, cuda-bindings, Triton and a PyTorch with CUDA ({error}); "
        "pip install 'blinkbed[cuda]'"
    ) from error

KV_BYTES = 2  # of a number in the KV cache: bfloat16
RESERVE_BYTES = 2 << 30  # activations, workspaces and graphs


class CudaDevice:
    """See engine.device.Device."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.xp: Any = CudaLibrary
        self.lost_errors: tuple[type[Exception], ...] = (
            CudaError,
            cupy.cuda.runtime.CUDARuntimeError,
        )

    def make_window(self, nbytes: int, path: Path | None, offset: int, home: str) -> Window:
        """Host memory that the GPU polls, with `path` that file's; or the GPU's own memory."""
        if home == STAGED:
            return DeviceWindow(nbytes)
        return HostWindow(nbytes, path, offset)

    def persistent_path(
        self, config: ServeConfig, source: ModelSource, memory: SchedulerMemory
    ) -> StepGraphs:
        """Load the model and instantiate the graphs for launching from the device."""
        launch_pass, buckets = self._model(config, source, memory)
        progress.progress("building kernels and capturing step graphs")
        return StepGraphs(memory, launch_pass, buckets)

    def _model(
        self, config: ServeConfig, source: ModelSource, memory: SchedulerMemory
    ) -> tuple[Callable[[int], None], tuple[int, ...]]:
        """What enqueues a pass of up to so many tokens, and for which numbers to capture it."""
        limits = config.scheduler
        if source.pace is not None:
            raise UserError("a paced model stands in for a GPU: it needs --device sim")
        if source.spec.architecture == "scripted":
            return scripted_launch(memory), (limits.max_step_tokens,)
        check_memory(config, source)
        progress.progress(f"loading weights into {self.name}")
        forward = CudaPass(
            source.spec,
            weights_on_device(source),
            memory,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            max_tokens=limits.max_step_tokens,
        )
        return forward.launch, token_buckets(limits.max_step_tokens)

    def host_driven_path(
        self,
        config: ServeConfig,
        source: ModelSource,
        memory: SchedulerMemory,
        device_memory: SchedulerMemory,
    ) -> HostDrivenLoop:
        """Load the model and capture one graph of a pass for each number of tokens."""
        launch_pass, buckets = self._model(config, source, device_memory)
        progress.progress("building kernels and capturing the passes")
        graphs = PassGraphs(memory, device_memory, launch_pass, buckets)
        depth = DEPTHS[config.path]
        return HostDrivenLoop(cupy, memory, graphs, depth=depth, zeros=pinned_zeros)

    def map_window(self, window: Window) -> np.ndarray:
        """It is memory of this process already."""
        array: np.ndarray = window.array
        return array


def scripted_launch(memory: SchedulerMemory) -> Callable[[int], None]:
    """Enqueues the scripted model's pass on torch's current stream."""
    source = CSRC / "scheduler_kernel.cu"
    kernel = load_module(source, device_launch=True).get_function("scripted_forward")
    state = np.uint64(device_pointer(memory.state))

    def launch(bucket: int) -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel((1,), (1,), (state,))

    return launch


def weights_on_device(source: ModelSource) -> Tensors:
    """In bfloat16; random ones are made on the device itself."""
    device = torch.device("cuda")
    if source.read is None:
        return random_device_weights(source.spec, device, torch.bfloat16)
    return load_weights(source.spec, source.weights(), device, torch.bfloat16)


def check_memory(config: ServeConfig, source: ModelSource) -> None:
    """Raise UserError if weights and KV cache do not fit into what is free."""
    spec, limits = source.spec, config.scheduler
    num_weights = sum(_product(shape) for shape in device_weights(spec).values())
    weights = KV_BYTES * (num_weights + spec.vocab_size * spec.hidden_size)  # the folded head
    per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * KV_BYTES
    cache = per_token * limits.num_pages * limits.page_size
    free, _ = cupy.cuda.runtime.memGetInfo()
    if weights + cache + RESERVE_BYTES > free:
        raise UserError(
            f"too little GPU memory: {spec.name} needs {weights >> 20} MiB for weights, "
            f"{cache >> 20} MiB for {limits.num_pages} KV pages and {RESERVE_BYTES >> 20} MiB "
            f"beside them, and {free >> 20} MiB are free; lower --num-pages or take a smaller model"
        )


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def open_device(config: ServeConfig) -> CudaDevice:
    """The first GPU that CUDA shows. Raises UserError without one."""
    try:
        properties = cupy.cuda.runtime.getDeviceProperties(0)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise UserError(
            f"--device cuda needs a CUDA GPU, and there is none ({error}); use --device sim"
        ) from error
    if not torch.cuda.is_available():
        raise UserError(
            f"PyTorch {torch.__version__} has no CUDA or finds no GPU; install its CUDA build"
        )
    return CudaDevice(properties["name"].decode())
