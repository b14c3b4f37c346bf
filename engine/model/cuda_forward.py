"""The Llama-family forward pass on CUDA, bf16, over the scheduler's tables in device memory.

A pass is captured once per token bucket: grids are sized for the bucket, lengths come from memory,
rows and tokens behind the step's last are harmless. Steps of few tokens read each weight once
through `kernels/gemm.py` (five launches a layer); steps of many use the library's products.

KV layout: [num_layers, num_pages, 2, num_kv_heads, page_size, head_dim], so that the keys of one
head in one page are contiguous.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.model.cuda_weights import Tensors
from engine.model.kernels.attention import paged_attention
from engine.model.kernels.elementwise import rms_normalize, rope_append, silu_multiply
from engine.model.kernels.gemm import skinny_gemm
from engine.model.spec import ModelSpec

LOG2_E = 1.4426950408889634
ROPE_HEADS = 8  # heads of a program of rope_append
RESIDUAL, QKV, SILU, LOGITS = range(4)  # kernels/gemm.py
BOTH, DECODE, PREFILL = range(3)  # kernels/attention.py


@dataclass(frozen=True, slots=True)
class Tile:
    """How one skinny product is cut up; measured, see docs/performance.md."""

    bn: int
    bk: int
    split_k: int = 1
    stages: int = 4
    warps: int = 4
    swap: bool = False


@dataclass(frozen=True, slots=True)
class Tuning:
    """Choices that do not change the results."""

    widest_skinny: int = 64  # tokens up to which kernels/gemm.py is used
    pdl: bool = True
    qkv: Tile = Tile(64, 128, stages=5, swap=True)
    o: Tile = Tile(64, 128, split_k=2, stages=5, swap=True)
    gate_up: Tile = Tile(64, 128, swap=True)
    down: Tile = Tile(64, 128, split_k=2, stages=5, swap=True)
    head: Tile = Tile(64, 128, swap=True)
    attention_splits: int = 16  # parts of a sequence's context at most
    attention_programs: int = 264  # beyond this many, contexts are not divided further
    attention_block: int = 64
    attention_least_blocks: int = 2
    attention_stages: int = 3
    attention_warps: int = 4
    # Buckets, from and to, in which decode and prefill are launches of their own: steps so wide are
    # mostly decode, and more programs of decode alone are at work at once.
    attention_apart: tuple[int, int] = (128, 256)
    attention_chunk: int = 128  # pages of a context that are looked up at once
    prefill_block: int = 64


@dataclass(slots=True)
class StepTables:
    """The scheduler's tables as tensors. plan: int32[8]; rows: int32[max_running, 16];
    block_tables: int32[num_seqs, max_pages]."""

    plan: torch.Tensor
    rows: torch.Tensor
    block_tables: torch.Tensor


class CudaForward:
    """Weights, KV cache and activations of one model; `run(bucket)` enqueues a pass on the current
    stream: x, positions, kv_slots, last_tokens and work are there, logits afterwards.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Tensors,
        tables: StepTables,
        *,
        num_pages: int,
        page_size: int,
        max_tokens: int,
        tuning: Tuning | None = None,
    ) -> None:
        self.spec, self.weights, self.tables = spec, weights, tables
        self.tuning = tuning or Tuning()
        self.page_size, self.max_tokens = page_size, max_tokens
        self.max_rows = tables.rows.shape[0]
        embed = weights["embed"]
        self.dtype, self.device = embed.dtype, embed.device
        self.kv_cache = self._empty(
            (spec.num_layers, num_pages, 2, spec.num_kv_heads, page_size, spec.head_dim)
        )
        # Bytes nobody has written must at least be numbers: masked scores times NaN are NaN.
        self.kv_cache.zero_()
        self.x = self._empty((max_tokens, spec.hidden_size))
        self.normed = self._empty((max(max_tokens, self.max_rows), spec.hidden_size))
        self.qkv = self._empty((max_tokens, spec.q_size + 2 * spec.kv_size))
        self.q = self._empty((max_tokens, spec.q_size))
        self.attended = self._empty((max_tokens, spec.q_size))
        self.gate_up = self._empty((max_tokens, 2 * spec.mlp_size))
        self.hidden = self._empty((max_tokens, spec.mlp_size))
        self.logits = self._empty((self.max_rows, spec.vocab_size), torch.float32)
        self.positions = self._zeros(max_tokens)
        self.kv_slots = self._zeros(max_tokens)
        self.last_tokens = self._zeros(self.max_rows)
        self.chunk = max(1, self.tuning.prefill_block // self._group)
        self.work = self._zeros(1 + 2 * self.num_items(max_tokens))
        self.frequencies = torch.from_numpy(spec.inverse_frequencies()).to(self.device)
        self._make_scratch()

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)

    def _make_scratch(self) -> None:
        t, spec = self.tuning, self.spec
        rows = min(self.max_rows, self.max_tokens)
        pairs = rows * spec.num_kv_heads
        self._group_pad = max(16, 1 << (self._group - 1).bit_length())
        cells = self._group_pad * (spec.head_dim + 2)
        self._attention_parts = self._empty((t.attention_splits, pairs, cells), torch.float32)
        self._attention_arrivals = self._zeros(pairs)
        widest = max(spec.q_size + 2 * spec.kv_size, spec.hidden_size, spec.mlp_size)
        split = max(tile.split_k for tile in (t.qkv, t.o, t.gate_up, t.down, t.head))
        tokens = max(16, t.widest_skinny)
        self.squares = self._empty((spec.hidden_size // 16 + 2, max(tokens, 64)), torch.float32)
        self._gemm_parts = self._empty((split * tokens * (widest + 256),), torch.float32)
        self._gemm_arrivals = self._zeros(max(widest, spec.vocab_size) // 8 + 1)

    @property
    def _group(self) -> int:
        return self.spec.num_heads // self.spec.num_kv_heads

    def num_rows(self, bucket: int) -> int:
        """Rows that a step of `bucket` tokens has at most."""
        return min(bucket, self.max_rows)

    def num_items(self, bucket: int) -> int:
        """Prefill chunks that a step of `bucket` tokens has at most."""
        return bucket // self.chunk + min(self.max_rows, bucket // 2) + 1

    def run(self, bucket: int) -> torch.Tensor:
        """Enqueue a pass for up to `bucket` tokens; logits, float32[rows, vocab]."""
        is_skinny = bucket <= self.tuning.widest_skinny and not self.spec.qk_norm
        for layer in range(self.spec.num_layers):
            (self._skinny_layer if is_skinny else self._wide_layer)(layer, bucket)
        rows = self.num_rows(bucket)
        out = self.logits[:rows]
        if is_skinny:
            self._skinny(
                self.x, self.weights["head"], out, LOGITS, self.tuning.head, rows,
                index=self.last_tokens, num_squares=self._tiles(self.tuning.down),
            )  # fmt: skip
        else:
            self._normalize(self.x, rows, index=self.last_tokens)
            head, normed = self.weights["head"], self.normed[:rows]
            if self.dtype == torch.float32:
                torch.mm(normed, head.t(), out=out)
            else:
                torch.mm(normed, head.t(), out_dtype=torch.float32, out=out)
        return out

    # ---- steps of few tokens

    def _skinny_layer(self, layer: int, bucket: int) -> None:
        w, p, t = self.weights, f"layers.{layer}.", self.tuning
        kv = self.kv_cache[layer]
        self._skinny(self.x, w[p + "qkv"], self.q, QKV, t.qkv, bucket, kv=kv,
                     bias=w.get(p + "qkv_bias"),
                     num_squares=self._tiles(t.down) if layer else 1)  # fmt: skip
        self._attend(kv, bucket)
        self._skinny(self.attended, w[p + "o"], self.x, RESIDUAL, t.o, bucket)
        self._skinny(self.x, w[p + "gate_up"], self.hidden, SILU, t.gate_up, bucket,
                     num_squares=self._tiles(t.o))  # fmt: skip
        self._skinny(self.hidden, w[p + "down"], self.x, RESIDUAL, t.down, bucket)

    def _tiles(self, tile: Tile) -> int:
        """Programs along the hidden size, each of which leaves its sum of squares."""
        return -(-self.spec.hidden_size // tile.bn)

    def _skinny(
        self,
        a: torch.Tensor,
        w: torch.Tensor,
        out: torch.Tensor,
        epilogue: int,
        tile: Tile,
        tokens: int,
        *,
        kv: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
        num_squares: int = 1,
    ) -> None:
        spec = self.spec
        n, k = w.shape
        bn = tile.bn
        while epilogue == QKV and (spec.q_size % bn or spec.kv_size % bn):
            bn //= 2
        bk = min(tile.bk, max(16, 1 << (k - 1).bit_length()))
        bm = max(16, 1 << (tokens - 1).bit_length())
        skinny_gemm[(-(-n // bn), tile.split_k)](
            a, w, out,
            self.last_tokens if index is None else index,
            out if bias is None else bias,
            self.positions, self.kv_slots, self.frequencies,
            out if kv is None else kv,
            self.squares, self.squares, self._gemm_parts, self._gemm_arrivals,
            tokens, spec.norm_eps,
            N=n, K=k, EPILOGUE=epilogue, SPLIT_K=tile.split_k, HAS_BIAS=bias is not None,
            Q_SIZE=spec.q_size, KV_HEADS=spec.num_kv_heads, HEAD_DIM=spec.head_dim,
            PAGE=self.page_size, BM=bm, BN=bn, BK=bk, STAGES=tile.stages, SWAP=tile.swap,
            NUM_SQUARES=num_squares, SQUARES_STRIDE=self.squares.shape[1],
            PDL=self.tuning.pdl,
            num_warps=tile.warps, **self._launch(),
        )  # fmt: skip

    def _splits(self, bucket: int) -> int:
        """Parts of a context for which a bucket's grid has programs: a step in it has more than
        half as many rows as the bucket has tokens, or else is not decode alone.
        """
        fewest = 1 if bucket <= 8 else min(bucket // 2 + 1, self.max_rows)
        programs = fewest * self.spec.num_kv_heads
        return max(1, min(self.tuning.attention_splits, self.tuning.attention_programs // programs))

    def _launch(self) -> dict[str, Any]:
        return {"launch_pdl": True} if self.tuning.pdl else {}

    def _attend(self, kv: torch.Tensor, bucket: int) -> None:
        rows, splits = self.num_rows(bucket), self._splits(bucket)
        decodes, items = splits * rows, self.num_items(bucket)
        least, most = self.tuning.attention_apart
        if not least <= bucket <= most:
            self._attend_parts(kv, BOTH, decodes + items, rows, splits)
        else:
            self._attend_parts(kv, DECODE, decodes, rows, splits)
            self._attend_parts(kv, PREFILL, items, rows, splits)

    def _attend_parts(
        self, kv: torch.Tensor, parts: int, programs: int, rows: int, splits: int
    ) -> None:
        spec, t, tables = self.spec, self.tuning, self.tables
        paged_attention[(programs * spec.num_kv_heads,)](
            self.q, kv, self.attended, tables.plan, tables.rows, tables.block_tables, self.work,
            self._attention_parts, self._attention_arrivals,
            spec.head_dim**-0.5 * LOG2_E, tables.block_tables.shape[1], rows,
            t.attention_programs,
            KV_HEADS=spec.num_kv_heads, GROUP=self._group, HEAD_DIM=spec.head_dim,
            PAGE=self.page_size, SPLITS=splits,
            LEAST_BLOCKS=t.attention_least_blocks, BLOCK_N=t.attention_block,
            BLOCK_M=max(t.prefill_block, self._group_pad), GROUP_PAD=self._group_pad,
            STAGES=t.attention_stages, PDL=t.pdl, PARTS=parts, CHUNK=t.attention_chunk,
            num_warps=t.attention_warps, **self._launch(),
        )  # fmt: skip

    # ---- steps of many tokens

    def _wide_layer(self, layer: int, bucket: int) -> None:
        w, p, spec = self.weights, f"layers.{layer}.", self.spec
        kv, x = self.kv_cache[layer], self.x[:bucket]
        self._normalize(self.x, bucket)
        normed = self.normed[:bucket]
        torch.mm(normed, w[p + "qkv"].t(), out=self.qkv[:bucket])
        bias, q_gain = w.get(p + "qkv_bias"), w.get(p + "q_norm")
        rope_append[(bucket, -(-(spec.num_heads + 2 * spec.num_kv_heads) // ROPE_HEADS))](
            self.qkv, self.q, self.x if bias is None else bias,
            self.x if q_gain is None else q_gain, w.get(p + "k_norm", self.x),
            self.positions, self.kv_slots, self.frequencies, kv, spec.norm_eps,
            HEADS=spec.num_heads, KV_HEADS=spec.num_kv_heads, HEAD_DIM=spec.head_dim,
            PAGE=self.page_size, HAS_BIAS=bias is not None, HAS_NORM=q_gain is not None,
            BLOCK=ROPE_HEADS, num_warps=4,
        )  # fmt: skip
        self._attend(kv, bucket)
        torch.addmm(x, self.attended[:bucket], w[p + "o"].t(), out=x)
        self._normalize(self.x, bucket)
        torch.mm(normed, w[p + "gate_up"].t(), out=self.gate_up[:bucket])
        block = 1024
        silu_multiply[(bucket, -(-spec.mlp_size // block))](
            self.gate_up, self.hidden, SIZE=spec.mlp_size, BLOCK=block, num_warps=4
        )
        torch.addmm(x, self.hidden[:bucket], w[p + "down"].t(), out=x)

    def _normalize(self, x: torch.Tensor, rows: int, index: torch.Tensor | None = None) -> None:
        hidden = self.spec.hidden_size
        rms_normalize[(rows,)](
            x, self.normed, self.last_tokens if index is None else index, self.spec.norm_eps,
            H=hidden, BLOCK=1 << (hidden - 1).bit_length(), GATHER=index is not None, num_warps=8,
        )  # fmt: skip

    def with_tuning(self, **changes: Any) -> Tuning:
        """The tuning with some choices changed."""
        return dataclasses.replace(self.tuning, **changes)


def view_as(array: Any, dtype: Any) -> torch.Tensor:
    """A CuPy array's memory as a tensor of another type, without a copy."""
    return torch.as_tensor(array.view(np.dtype(dtype)), device="cuda")
