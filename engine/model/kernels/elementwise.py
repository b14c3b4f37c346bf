"""The small kernels between library matrix products, for steps of many tokens."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_normalize(x_ptr, out_ptr, index_ptr, eps, H: tl.constexpr, BLOCK: tl.constexpr,
                  GATHER: tl.constexpr):  # fmt: skip
    """out[t] = x[t] / rms(x[t]); the norm's weight is folded into the matrix behind it.

    GATHER: row t of the output is row index[t] of the input.
    """
    t = tl.program_id(0)
    source = tl.load(index_ptr + t) if GATHER else t
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + source.to(tl.int64) * H + i, mask=i < H, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / H + eps)
    tl.store(out_ptr + t.to(tl.int64) * H + i, x * scale, mask=i < H)


@triton.jit
def rope_append(qkv_ptr, q_ptr, bias_ptr, q_gain_ptr, k_gain_ptr, positions_ptr, kv_slots_ptr,
                frequencies_ptr, kv_ptr, eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, HAS_BIAS: tl.constexpr,
                HAS_NORM: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """BLOCK heads of one token: bias, the head's own norm, RoPE on pairs of neighbours; queries go
    to q[T, HEADS, HEAD_DIM], keys and values into their KV page (kv_slots[t] < 0: nowhere)."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total: tl.constexpr = HEADS + 2 * KV_HEADS
    half: tl.constexpr = HEAD_DIM // 2
    d, pair = tl.arange(0, HEAD_DIM), tl.arange(0, half)
    at = head[:, None] * HEAD_DIM + d[None, :]
    used = (head < total)[:, None]
    x = tl.load(qkv_ptr + t * (total * HEAD_DIM) + at, mask=used, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + at, mask=used, other=0.0).to(tl.float32)
    is_turned = (head < HEADS + KV_HEADS)[:, None]
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        q_gain = tl.load(q_gain_ptr + d).to(tl.float32)[None, :]
        k_gain = tl.load(k_gain_ptr + d).to(tl.float32)[None, :]
        gain = tl.where((head < HEADS)[:, None], q_gain, k_gain)
        x = tl.where(is_turned, x * scale * gain, x)
    angle = tl.load(positions_ptr + t).to(tl.float32) * tl.load(frequencies_ptr + pair)
    cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
    even, odd = tl.split(tl.reshape(x, (BLOCK, half, 2)))
    turned = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    x = tl.where(is_turned, tl.reshape(turned, (BLOCK, HEAD_DIM)), x)
    tl.store(q_ptr + t * (HEADS * HEAD_DIM) + at, x, mask=(head < HEADS)[:, None])
    slot = tl.load(kv_slots_ptr + t)
    is_value = head >= HEADS + KV_HEADS
    own = head - HEADS - tl.where(is_value, KV_HEADS, 0)
    line = (slot // PAGE * 2 + tl.where(is_value, 1, 0)).to(tl.int64) * KV_HEADS + own
    to = (line * PAGE + slot % PAGE)[:, None] * HEAD_DIM + d[None, :]
    is_kept = (head >= HEADS)[:, None] & used & (slot >= 0)
    tl.store(kv_ptr + to, x, mask=is_kept)


@triton.jit
def silu_multiply(gate_up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """out[t, i] = silu(gate_up[t, 2 * i]) * gate_up[t, 2 * i + 1]."""
    t = tl.program_id(0).to(tl.int64)
    both = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    pairs = tl.load(gate_up_ptr + t * (2 * SIZE) + both, mask=both < 2 * SIZE, other=0.0)
    gate, up = tl.split(tl.reshape(pairs.to(tl.float32), (BLOCK, 2)))
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + t * SIZE + i, gate * tl.sigmoid(gate) * up, mask=i < SIZE)
