"""The model's kernels in the simulated device: weights in, then a forward and sampling per step.

Runs inside the device's process, which calls these methods as kernels with NumPy views of device
memory (the simulator's counterpart of library kernels such as cuBLAS). It depends on nothing of
the simulator: plain NumPy arrays do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.model import native_forward
from engine.model.batch import read_batch
from engine.model.forward import Beats, Forward, MakeForward
from engine.model.sampling import sample
from engine.model.spec import ModelSpec, device_weights
from engine.protocol import C_CONSTANTS, PROGRESS

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


class Program:
    """Kernels ``load``, ``add_weight`` (one each), ``finish``, then ``forward`` once a step.

    The weights stay where they are given, in device memory: no copy of them is kept.
    """

    def load(
        self,
        spec_json: Bytes,
        page_size: int,
        max_context: int,
        num_threads: int,
        plain_torch: int = 0,
    ) -> None:
        """Take the model's numbers (``ModelSpec.to_json`` as bytes) and the geometry.

        ``plain_torch``: run the readable torch forward instead of the native one.
        """
        self._spec = ModelSpec.from_json(bytes(spec_json))
        self._page_size, self._max_context = int(page_size), int(max_context)
        self._num_threads = max(1, int(num_threads))
        self._plain_torch = bool(plain_torch)
        self._expected = device_weights(self._spec)
        self._weights: dict[str, Floats] = {}
        self._beats: Beats | None = None

    def add_weight(self, name: Bytes, weight: Floats) -> None:
        """Take one device weight (``spec.device_weights``) by name; the array must stay.

        Raises ValueError for a name, shape or type that the model does not have.
        """
        text = bytes(name).decode()
        expected = self._expected.get(text)
        if weight.shape != expected or weight.dtype != np.float32 or not weight.flags.c_contiguous:
            raise ValueError(
                f"weight {text} is {weight.dtype}{list(weight.shape)}, must be float32{expected}"
            )
        self._weights[text] = weight

    def watch(self, window: Bytes, port_bytes: int) -> None:
        """Show signs of life during a pass in each port's progress line (``pass_beat``)."""
        at = C_CONSTANTS["kProgressOffset"] + PROGRESS.offset("pass_beat")
        ports = window.reshape(-1, int(port_bytes))
        self._beats = ports[:, at : at + 8].view(np.uint64)[:, 0]

    def finish(self) -> None:
        """All weights are there: get ready. Raises ValueError if one is missing."""
        missing = self._expected.keys() - self._weights.keys()
        if missing:
            raise ValueError(f"weights missing: {', '.join(sorted(missing)[:3])}")
        self._forward: Forward = self._make()(
            self._spec,
            self._weights,
            page_size=self._page_size,
            max_context=self._max_context,
            num_threads=self._num_threads,
        )
        self._forward.beats = self._beats

    def _make(self) -> MakeForward:
        if self._plain_torch or not native_forward.supports(self._spec):
            # torch takes seconds and 200 MB to import: only who uses it pays.
            from engine.model.torch_forward import TorchForward

            return TorchForward
        return native_forward.NativeForward

    def forward(
        self,
        plan: npt.NDArray[Any],
        rows: npt.NDArray[Any],
        history: Ints,
        block_tables: Ints,
        kv_cache: Floats,
        results: npt.NDArray[Any],
        records: Bytes,
        alternatives: npt.NDArray[Any],
    ) -> None:
        """Run one step: PLAN[1], ROW[max_running], RESULT[max_running] of engine/state.py.

        ``history`` is int32[num_seqs, max_context], ``block_tables`` int32[num_seqs,
        max_pages_per_seq], ``kv_cache`` float32[num_layers, 2, num_pages, page_size,
        num_kv_heads, head_dim], ``records`` u8[num_seqs * slot_bytes], ``alternatives``
        RESULT[max_running, MAX_LOGPROBS]. Writes the keys and values of all the step's tokens, and
        for each row with SAMPLE its result, its alternatives where it wants any, and the sampled id
        into ``history``.
        """
        batch = read_batch(
            plan, rows, history, block_tables, self._page_size, self._spec.vocab_size
        )
        if batch.num_tokens == 0:
            return
        logits = self.logits(batch, block_tables, kv_cache)
        records = records.reshape(len(history), -1)
        sample(logits, batch, history, results, alternatives, self._spec.eos_ids, records)

    def logits(self, batch: Any, block_tables: Ints, kv_cache: Floats) -> Floats:
        """float32[S, vocab] of the rows that sample; the forward pass alone."""
        return self._forward(batch, block_tables, kv_cache)
