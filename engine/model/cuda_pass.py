"""One pass on CUDA for the step graphs: the step's tokens in, the forward pass, sampling."""

from __future__ import annotations

from pathlib import Path

import cupy
import numpy as np
import torch

from engine.device.cuda import load_module
from engine.model.cuda_forward import CudaForward, StepTables, Tuning, view_as
from engine.model.cuda_weights import Tensors
from engine.model.spec import ModelSpec
from engine.scheduler_memory import SchedulerMemory, device_pointer

KERNELS = Path(__file__).parent / "kernels"
PREPARE_THREADS, PEAK_THREADS, SAMPLE_THREADS = 128, 256, 1024
PEAK_PARTS, PEAK_BYTES = 16, 16


class CudaPass:
    """`launch(bucket)` enqueues a pass for up to `bucket` tokens on torch's current stream."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Tensors,
        memory: SchedulerMemory,
        *,
        num_pages: int,
        page_size: int,
        max_tokens: int,
        tuning: Tuning | None = None,
    ) -> None:
        arrays = memory.arrays
        tables = StepTables(
            plan=view_as(arrays["plan"], np.int32),
            rows=view_as(arrays["rows"], np.int32).view(-1, 16),
            block_tables=view_as(arrays["block_tables"], np.int32),
        )
        self.forward = CudaForward(
            spec,
            weights,
            tables,
            num_pages=num_pages,
            page_size=page_size,
            max_tokens=max_tokens,
            tuning=tuning,
        )
        module = load_module(KERNELS / "step_kernels.cu")
        self._prepare = module.get_function("prepare_step")
        self._peak = module.get_function("peak_step")
        self._sample = module.get_function("sample_step")
        self._state = np.uint64(device_pointer(memory.state))
        shape = self.forward.logits.shape
        self._peaks = torch.empty(
            shape[0] * PEAK_PARTS * PEAK_BYTES, dtype=torch.uint8, device="cuda"
        )
        self._raw = torch.empty(shape, dtype=torch.float32, device="cuda")
        self._seen = torch.zeros(shape, dtype=torch.int32, device="cuda")

    def launch(self, bucket: int) -> None:
        """Enqueue it; reads the plan, writes results and history."""
        f = self.forward
        rows = f.num_rows(bucket)
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            self._prepare(
                (bucket + 1,),
                (PREPARE_THREADS,),
                (
                    self._state, _at(f.weights["embed"]), _at(f.x), _at(f.positions),
                    _at(f.kv_slots), _at(f.last_tokens), _at(f.work), _at(f.squares),
                    np.int32(f.spec.hidden_size), np.int32(bucket), np.int32(rows),
                    np.int32(f.chunk), np.int32(f.squares.shape[1]),
                ),
            )  # fmt: skip
            f.run(bucket)
            self.sample(rows)

    def sample(self, rows: int) -> None:
        """Enqueue sampling from `forward.logits` on CuPy's current stream."""
        logits, peaks = _at(self.forward.logits), _at(self._peaks)
        self._peak((rows, PEAK_PARTS), (PEAK_THREADS,), (self._state, logits, peaks))
        self._sample(
            (rows,),
            (SAMPLE_THREADS,),
            (self._state, logits, _at(self._raw), _at(self._seen), peaks),
        )


def _at(tensor: torch.Tensor) -> np.uint64:
    return np.uint64(tensor.data_ptr())
