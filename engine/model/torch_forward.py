"""The forward pass in plain torch: the readable twin of csrc/llama.cpp.

The native one's definition in tests, and used for heads that its vectors do not divide.
Results agree with the native ones to float32 rounding; torch chooses its matrix kernels by shape,
so unlike there a row's rounding may depend on how many rows are computed with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812, torch's own convention
from torch import Tensor

from engine.model.batch import Batch
from engine.model.forward import Beats, Floats, rotary_table
from engine.model.spec import ModelSpec, Weight


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights."""

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class TorchForward:
    """A ``forward.Forward``. T tokens, L tokens of a row's context, float32 throughout."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Weight],
        *,
        page_size: int,
        max_context: int,
        num_threads: int,
    ) -> None:
        self.beats: Beats | None = None
        torch.set_num_threads(num_threads)
        tensors = {name: torch.from_numpy(weight) for name, weight in weights.items()}
        self.spec, self.page_size = spec, page_size
        self._embed, self._norm = tensors["embed"], tensors["norm"]
        self._head = tensors.get("head", self._embed)
        self._cos_sin = torch.from_numpy(rotary_table(spec, max_context))
        names = Layer.__dataclass_fields__
        self._layers = [
            Layer(**{name: tensors.get(f"layers.{layer}.{name}") for name in names})  # type: ignore[arg-type]
            for layer in range(spec.num_layers)
        ]

    @torch.inference_mode()
    def __call__(
        self, batch: Batch, block_tables: npt.NDArray[np.int32], kv_cache: Floats
    ) -> Floats:
        cos, sin = self._cos_sin[torch.from_numpy(batch.positions)].unbind(1)
        contexts = self._contexts(batch, block_tables)
        hidden = self._embed[torch.from_numpy(batch.token_ids)]
        for layer, cache in zip(self._layers, torch.from_numpy(kv_cache), strict=True):
            normed = self._rms_norm(hidden, layer.attn_norm)
            queries, keys, values = self._heads(F.linear(normed, layer.qkv, layer.qkv_bias))
            if layer.q_norm is not None and layer.k_norm is not None:
                queries = self._rms_norm(queries, layer.q_norm)
                keys = self._rms_norm(keys, layer.k_norm)
            self._store(batch, cache, _rotate(keys, cos, sin), values)
            mixed = self._attention(batch, contexts, _rotate(queries, cos, sin), cache)
            hidden = hidden + F.linear(mixed, layer.o)
            normed = self._rms_norm(hidden, layer.mlp_norm)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
            if self.beats is not None:
                self.beats += np.uint64(1)
        last = hidden[torch.from_numpy(batch.last_token)]
        logits: Floats = F.linear(self._rms_norm(last, self._norm), self._head).numpy()
        return logits

    def close(self) -> None:
        self._layers = []

    def _contexts(self, batch: Batch, block_tables: npt.NDArray[np.int32]) -> list[Tensor]:
        """KV indices of all positions of each row's sequence: [L] each."""
        contexts = []
        for seq, length in zip(batch.seq, batch.context_length, strict=True):
            position = np.arange(length)
            page = block_tables[seq, position // self.page_size].astype(np.int64)
            contexts.append(torch.from_numpy(page * self.page_size + position % self.page_size))
        return contexts

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.spec.norm_eps)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, heads, head_dim] of queries, keys and values."""
        heads = qkv.view(len(qkv), -1, self.spec.head_dim)
        kv_heads = self.spec.num_kv_heads
        queries, keys, values = torch.split(heads, [self.spec.num_heads, kv_heads, kv_heads], 1)
        return queries, keys, values

    def _store(self, batch: Batch, cache: Tensor, keys: Tensor, values: Tensor) -> None:
        kv_index = torch.from_numpy(batch.kv_index)
        cache[0].flatten(0, 1)[kv_index] = keys
        cache[1].flatten(0, 1)[kv_index] = values

    def _attention(
        self, batch: Batch, contexts: list[Tensor], queries: Tensor, cache: Tensor
    ) -> Tensor:
        """Causal attention of each row over its own pages: [T, heads * head_dim]."""
        mixed = torch.empty(queries.shape)
        keys, values = cache[0].flatten(0, 1), cache[1].flatten(0, 1)
        for row, context in enumerate(contexts):
            length = int(batch.query_length[row])
            part = slice(int(batch.query_start[row]), int(batch.query_start[row]) + length)
            visible = torch.ones(length, len(context), dtype=torch.bool)
            mixed[part] = F.scaled_dot_product_attention(
                queries[part].transpose(0, 1)[None],
                keys[context].transpose(0, 1)[None],
                values[context].transpose(0, 1)[None],
                attn_mask=visible.tril(len(context) - length),
                enable_gqa=True,
            )[0].transpose(0, 1)
        return mixed.flatten(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of [T, heads, head_dim] by [T, head_dim / 2]: halves, not neighbours, are pairs."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
