"""What a forward pass is, whatever computes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.model.batch import Batch
from engine.model.spec import ModelSpec, Weight

Floats = npt.NDArray[np.float32]
Beats = npt.NDArray[np.uint64]
"""Signs of life, uint64[num_ports]: a pass adds one to each after each layer."""


class Forward(Protocol):
    """A model with its weights, ready to run steps."""

    beats: Beats | None

    def __call__(
        self, batch: Batch, block_tables: npt.NDArray[np.int32], kv_cache: Floats
    ) -> Floats:
        """Run one step's tokens through all layers: logits, float32[S, vocab].

        Writes keys and values of all the step's tokens into ``kv_cache``. The S rows are those of
        ``batch.sampled``. The result may be overwritten by the next call.
        """

    def close(self) -> None:
        """Free what is held; may be called again."""


class MakeForward(Protocol):
    """How a Forward is made; the weights stay where they are, so they must outlive it."""

    def __call__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Weight],
        *,
        page_size: int,
        max_context: int,
        num_threads: int,
    ) -> Forward: ...


def rotary_table(spec: ModelSpec, max_context: int) -> Floats:
    """Cosines, then sines of each position's angles: float32[max_context, 2, head_dim / 2]."""
    positions = np.arange(max_context, dtype=np.float32)
    angles = positions[:, None] * spec.inverse_frequencies()[None, :]
    return np.stack((np.cos(angles), np.sin(angles)), axis=1)
