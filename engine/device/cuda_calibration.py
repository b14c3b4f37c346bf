"""Times single steps of a model on the GPU, with the graphs that the server runs.

The graph of a step is its forward pass with sampling; the scheduler node, whose plan is written by
hand here, is not in it.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import torch

from engine.calibrate import Sample, Step, bucket_of
from engine.config import RingConfig, SchedulerConfig, ServeConfig
from engine.device.cuda import CudaLibrary
from engine.device.cuda_device import check_memory, open_device, weights_on_device
from engine.device.step_graphs import token_buckets
from engine.errors import UserError
from engine.model.cuda_pass import CudaPass
from engine.model.source import open_model
from engine.scheduler_memory import ModelLimits, SchedulerMemory
from engine.state import PLAN, ROW, RowFlag

PAGE_SIZE = 16
MAX_CONTEXT = 8448
WARM_UP = 3


class StepTimer:
    """A model with its KV cache on the GPU, and a graph for each bucket."""

    def __init__(
        self, model: str, *, max_step_tokens: int, max_running: int, num_pages: int, repeat: int
    ) -> None:
        limits = SchedulerConfig(
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            max_context=MAX_CONTEXT,
        )
        config = ServeConfig(scheduler=limits)
        device = open_device(config)
        source = open_model(model)
        spec = source.spec
        if spec.architecture == "scripted":
            raise UserError("the scripted model takes the GPU no time: calibrate a real one")
        check_memory(config, source)
        self.buckets = token_buckets(max_step_tokens)
        self.max_kv_tokens = (num_pages - limits.max_running) * PAGE_SIZE
        self._repeat = repeat
        self._memory = make_memory(limits, ModelLimits(spec.vocab_size, MAX_CONTEXT, spec.eos_ids))
        self._pass = CudaPass(
            spec,
            weights_on_device(source),
            self._memory,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            max_tokens=max_step_tokens,
        )
        rng = np.random.default_rng(1)
        self._pages = rng.permutation(num_pages).astype(np.int32)
        history = self._memory.arrays["history"]
        history.set(rng.integers(0, spec.vocab_size, history.shape, np.int32))
        # Zeros would be read faster than a real cache: they draw less power.
        for layer in self._pass.forward.kv_cache:
            layer.normal_()
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.facts = {
            "model": model,
            "hardware": device.name,
            "software": f"CUDA {torch.version.cuda}, torch {torch.__version__}",
            "how": f"median of {repeat} runs of a step's graph between two CUDA events",
        }

    def measure(self, step: Step) -> Sample:
        """Run the step `repeat` times, after a few that do not count."""
        self._plan(step)
        graph = self._graph(self.buckets[bucket_of(self.buckets, step)])
        runs = []
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP + self._repeat):
                began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                began.record(self._stream)
                graph.replay()
                ended.record(self._stream)
                runs.append((began, ended))
            self._stream.synchronize()
        p10, p50, p90 = np.percentile(
            [1e6 * began.elapsed_time(ended) for began, ended in runs[WARM_UP:]], [10, 50, 90]
        )
        return Sample(step, round(float(p50)), round(float(p10)), round(float(p90)))

    def _graph(self, bucket: int) -> torch.cuda.CUDAGraph:
        if bucket not in self._graphs:
            with torch.cuda.stream(self._stream):
                self._pass.launch(bucket)  # compiles, outside of the capture
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream):
                self._pass.launch(bucket)
            self._graphs[bucket] = graph
        return self._graphs[bucket]

    def _plan(self, step: Step) -> None:
        """Write plan, rows and page tables: decode rows first, as the scheduler does."""
        arrays = self._memory.arrays
        rows = np.zeros(arrays["rows"].size // ROW.dtype.itemsize, ROW.dtype)
        tables = np.zeros(arrays["block_tables"].shape, np.int32)
        work = [(step.decode_context, 1)] * step.decode_rows
        work += [(step.prefill_offset, step.prefill_tokens)] * (step.prefill_tokens > 0)
        start = used = 0
        for seq, (row, (first, count)) in enumerate(zip(rows, work, strict=False)):
            row["seq"], row["query_start"] = seq, start
            row["num_tokens"], row["first_position"] = count, first
            row["num_prompt_tokens"] = max(first, 1)
            row["flags"], row["repetition_penalty"], row["top_p"] = RowFlag.SAMPLE, 1, 1
            pages = -(-(first + count) // PAGE_SIZE)
            tables[seq, :pages] = self._pages[used : used + pages]
            start, used = start + count, used + pages
        plan = np.zeros(1, PLAN.dtype)
        plan["num_rows"] = plan["num_sampled"] = len(work)
        plan["num_tokens"], plan["num_decode_rows"] = start, step.decode_rows
        arrays["plan"].set(plan.view(np.uint8))
        arrays["rows"].set(rows.view(np.uint8))
        arrays["block_tables"].set(tables)
        cupy.cuda.Device().synchronize()


def make_memory(limits: SchedulerConfig, model: ModelLimits) -> SchedulerMemory:
    """The tables that a pass reads and writes; nobody looks at the window."""
    slots = 1 << (limits.max_running - 1).bit_length()
    ring = RingConfig(num_slots=slots, num_ports=1, token_ring_entries=max(16, 2 * slots))
    library: Any = CudaLibrary
    window = np.zeros(1 << 26, np.uint8)
    return SchedulerMemory(library, window, ring, limits, model, 1)
