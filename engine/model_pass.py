"""The model on the device: its memory there, and the launch of one pass for the step graph."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from engine import progress
from engine.config import ServeConfig
from engine.errors import UserError
from engine.model import native_forward
from engine.model.pace import Pace
from engine.model.source import ModelSource
from engine.model.spec import ModelSpec, device_weights
from engine.scheduler_memory import SchedulerMemory

PROGRAM = "engine.model.program:Program"


def model_pass(
    xp: ModuleType,
    config: ServeConfig,
    source: ModelSource,
    memory: SchedulerMemory,
    module: Any,
) -> Callable[[], None]:
    """Load the model; the returned function launches one pass on the current stream."""
    if source.pace is not None:
        return _paced_pass(xp, config, source.pace, memory, module)
    if source.spec.architecture == "scripted":
        kernel = module.get_function("scripted_forward")
        return lambda: kernel((1,), (1,), (memory.state,))
    return _transformer_pass(xp, config, source, memory)


def _paced_pass(
    xp: ModuleType, config: ServeConfig, pace: Pace, memory: SchedulerMemory, module: Any
) -> Callable[[], None]:
    if config.scheduler.max_step_tokens > pace.buckets[-1]:
        raise UserError(
            f"the profile {pace.name} knows steps of up to {pace.buckets[-1]} tokens; lower "
            f"--max-step-tokens={config.scheduler.max_step_tokens}"
        )
    how = "measured" if pace.measured else "estimated"
    progress.progress(f"steps take as long as on {pace.hardware}, {how} {pace.date}")
    kernel = module.get_function("paced_forward")
    struct = xp.asarray(pace.to_struct().view(np.uint8))
    return lambda: kernel((1,), (1,), (memory.state, struct))


def _transformer_pass(
    xp: ModuleType, config: ServeConfig, source: ModelSource, memory: SchedulerMemory
) -> Callable[[], None]:
    spec, limits = source.spec, config.scheduler
    if source.read is None:
        raise UserError(
            f"--model {config.model.model} is made on the GPU itself: it needs --device cuda"
        )
    check_memory(xp, config, source)
    program = xp.RawModule(path=PROGRAM, backend="python")

    def call(name: str, *arguments: Any) -> None:
        program.get_function(name)((1,), (1,), arguments)

    call(
        "load",
        xp.asarray(np.frombuffer(spec.to_json().encode(), np.uint8)),
        limits.page_size,
        limits.max_context,
        config.device.num_threads,
    )
    num_weights = len(device_weights(spec))
    held = []  # the device's program works on these arrays: they live as long as its launches
    for index, (name, weight) in enumerate(source.weights()):
        if index % 16 == 0:
            progress.progress(f"loading weights, {100 * index // num_weights} %")
        held.append(xp.asarray(weight))
        call("add_weight", xp.asarray(np.frombuffer(name.encode(), np.uint8)), held[-1])
    progress.progress(f"forward pass: {forward_kind(spec)}")
    call("watch", memory.window, memory.geometry.port_bytes)
    call("finish")
    kv_cache = xp.zeros(
        (spec.num_layers, 2, limits.num_pages, limits.page_size, spec.num_kv_heads, spec.head_dim),
        np.float32,
    )
    arrays = memory.arrays
    forward = program.get_function("forward")
    arguments = (
        arrays["plan"],
        arrays["rows"],
        arrays["history"],
        arrays["block_tables"],
        kv_cache,
        arrays["results"],
        arrays["records"],
        arrays["alternatives"],
    )
    xp.cuda.Device().synchronize()

    def launch(_weights: list[Any] = held) -> None:
        forward((1,), (1,), arguments)

    return launch


def forward_kind(spec: ModelSpec) -> str:
    """Which forward pass engine.model.program takes, and why; builds the native one if need be."""
    if native_forward.supports(spec):
        return "native"
    return (
        f"plain torch, slower (a head of {spec.head_dim} numbers is not a whole number of this "
        "processor's vectors)"
    )


def check_memory(xp: ModuleType, config: ServeConfig, source: ModelSource) -> None:
    """Raise UserError if weights and KV cache do not fit into what the device has free."""
    spec, limits = source.spec, config.scheduler
    kv_bytes = spec.kv_bytes_per_token * limits.num_pages * limits.page_size
    free_bytes, _ = xp.cuda.runtime.memGetInfo()
    if spec.weights_bytes + kv_bytes > free_bytes:
        raise UserError(
            f"too little memory: {spec.name} needs {spec.weights_bytes >> 20} MiB for weights and "
            f"{kv_bytes >> 20} MiB for {limits.num_pages} KV pages, and the device has "
            f"{free_bytes >> 20} MiB free; lower --num-pages or take a smaller model"
        )
