"""Drives the CUDA pass with plain tables, and says in float64 what must come out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine.config import RingConfig, SchedulerConfig
from engine.device.cuda import CudaLibrary
from engine.model.cuda_forward import Tuning
from engine.model.cuda_pass import CudaPass
from engine.model.cuda_weights import Tensors
from engine.model.spec import ModelSpec
from engine.protocol import MAX_LOGPROBS
from engine.scheduler_memory import ModelLimits, SchedulerMemory
from engine.state import PLAN, RESULT, ROW, RowFlag

Floats = dict[str, torch.Tensor]


def reference_logits(spec: ModelSpec, weights: Floats, ids: torch.Tensor) -> torch.Tensor:
    """Logits of every position, in the weights' own precision; device naming, rotate_half order."""
    w, n = weights, len(ids)
    x = w["embed"][ids]
    frequencies = torch.from_numpy(spec.inverse_frequencies()).to(x)
    angle = torch.arange(n).to(x)[:, None] * frequencies
    cos, sin = torch.cat([angle.cos()] * 2, -1)[:, None], torch.cat([angle.sin()] * 2, -1)[:, None]
    mask = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
    group = spec.num_heads // spec.num_kv_heads

    def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + spec.norm_eps) * gain

    def turn(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    for layer in range(spec.num_layers):
        p = f"layers.{layer}."
        qkv = norm(x, w[p + "attn_norm"]) @ w[p + "qkv"].T
        if spec.qkv_bias:
            qkv = qkv + w[p + "qkv_bias"]
        q, k, v = (
            part.view(n, -1, spec.head_dim)
            for part in torch.split(qkv, [spec.q_size, spec.kv_size, spec.kv_size], -1)
        )
        if spec.qk_norm:
            q, k = norm(q, w[p + "q_norm"]), norm(k, w[p + "k_norm"])
        q, k = turn(q), turn(k).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.head_dim**-0.5
        share = scores.masked_fill(mask, -1e30).softmax(-1)
        seen = torch.einsum("hqk,khd->qhd", share, v.repeat_interleave(group, 1))
        x = x + seen.reshape(n, -1) @ w[p + "o"].T
        gate, up = (norm(x, w[p + "mlp_norm"]) @ w[p + "gate_up"].T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ w[p + "down"].T
    head = w["embed"] if spec.tied_embeddings else w["head"]
    return norm(x, w["norm"]) @ head.T


class CudaModel:
    """A pass over hand-made plans: `num_seqs` sequences, pages in random order."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Tensors,
        *,
        num_seqs: int = 64,
        max_context: int = 512,
        page_size: int = 16,
        max_tokens: int = 256,
        tuning: Tuning | None = None,
    ) -> None:
        pages = -(-max_context // page_size)
        scheduler = SchedulerConfig(
            num_pages=num_seqs * pages,
            page_size=page_size,
            max_running=num_seqs,
            max_step_tokens=max(max_tokens, num_seqs),
            max_context=max_context,
        )
        limits = ModelLimits(spec.vocab_size, max_context, spec.eos_ids)
        ring = RingConfig(num_slots=num_seqs, num_ports=1, token_ring_entries=max(16, num_seqs))
        library: Any = CudaLibrary
        self.memory = SchedulerMemory(
            library, np.zeros(1 << 24, np.uint8), ring, scheduler, limits, 1
        )
        self.max_context = max_context
        self.history = np.zeros((num_seqs, max_context), np.int32)
        order = np.random.default_rng(1).permutation(num_seqs * pages).astype(np.int32)
        self.memory.arrays["block_tables"].set(order.reshape(num_seqs, pages))
        self.pass_ = CudaPass(
            spec,
            weights,
            self.memory,
            num_pages=scheduler.num_pages,
            page_size=page_size,
            max_tokens=max_tokens,
            tuning=tuning,
        )

    def plan(self, work: list[tuple[int, int, int]], **fields: Any) -> None:
        """Upload the plan for (sequence, first position, number of tokens) each, all sampling."""
        rows = np.zeros(self.memory.arrays["rows"].size // ROW.dtype.itemsize, ROW.dtype)
        start = 0
        for row, (seq, first, count) in zip(rows, work, strict=False):
            row["seq"], row["query_start"] = seq, start
            row["num_tokens"], row["first_position"] = count, first
            row["flags"], row["repetition_penalty"], row["top_p"] = RowFlag.SAMPLE, 1, 1
            for name, value in fields.items():
                row[name] = value
            start += count
        self.upload(rows, len(work), start)

    def upload(self, rows: np.ndarray, num_rows: int, num_tokens: int) -> None:
        plan = np.zeros(1, PLAN.dtype)
        plan["num_rows"], plan["num_tokens"] = num_rows, num_tokens
        self.memory.arrays["plan"].set(plan.view(np.uint8))
        self.memory.arrays["rows"].set(rows.view(np.uint8))
        self.memory.arrays["history"].set(self.history)

    def results(self, num_rows: int) -> np.ndarray:
        raw: np.ndarray = self.memory.arrays["results"].get().view(RESULT.dtype)
        return raw[:num_rows]

    def alternatives(self, num_rows: int) -> np.ndarray:
        raw: np.ndarray = self.memory.arrays["alternatives"].get().view(RESULT.dtype)
        return raw.reshape(-1, MAX_LOGPROBS)[:num_rows]
