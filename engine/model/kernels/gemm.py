"""Matrix products for few tokens: bound by reading the weights, so everything else rides along.

One kernel, four endings (``EPILOGUE``). RMSNorm costs nothing extra: its weight is folded into the
matrix when the model is loaded, and its scale is a factor per token, made from the sums of squares
that whoever wrote the input left for each of its tiles. ``SPLIT_K`` programs share a tile's inner
axis; the last to arrive adds the parts in a fixed order, so results do not depend on who was first.

With ``PDL`` a kernel starts while the one before it still runs, and then waits for that one's
results (programmatic dependent launch).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

RESIDUAL = tl.constexpr(0)  # out[m, n] += product
QKV = tl.constexpr(1)  # norm, bias, RoPE; q to out, k and v into their KV page
SILU = tl.constexpr(2)  # norm, silu(gate) * up; even rows of w are gate, odd rows up
LOGITS = tl.constexpr(3)  # norm, rows gathered by index, float32 out


@triton.jit
def _rotate(values, positions, columns, frequencies, HEAD_DIM: tl.constexpr, BM: tl.constexpr,
            BN: tl.constexpr):  # fmt: skip
    """RoPE on pairs of neighbours; `columns` are those of the tile within the heads."""
    even, odd = tl.split(tl.reshape(values, (BM, BN // 2, 2)))
    pair = tl.min(tl.reshape(columns, (BN // 2, 2)), axis=1) % HEAD_DIM // 2
    angle = positions[:, None].to(tl.float32) * tl.load(frequencies + pair)[None, :]
    cos, sin = tl.cos(angle), tl.sin(angle)
    turned = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    return tl.reshape(turned, (BM, BN))


@triton.jit
def skinny_gemm(  # noqa: C901 - one kernel, four endings chosen at compile time
    a_ptr,  # [T, K]
    w_ptr,  # [N, K]
    out_ptr,  # [T, N]; QKV: [T, Q_SIZE]; SILU: [T, N / 2]
    index_ptr,  # LOGITS: int32[T], rows of a
    bias_ptr,  # QKV with HAS_BIAS: [N]
    positions_ptr,  # QKV: int32[T]
    kv_slots_ptr,  # QKV: int32[T], page * PAGE + offset, -1: none
    frequencies_ptr,  # QKV: float32[HEAD_DIM / 2]
    kv_ptr,  # QKV: the layer's KV, [pages, 2, KV_HEADS, PAGE, HEAD_DIM]
    squares_in_ptr,  # float32[NUM_SQUARES, SQUARES_STRIDE] of a; not for RESIDUAL
    squares_out_ptr,  # RESIDUAL: float32[tiles, SQUARES_STRIDE] of out
    parts_ptr,  # SPLIT_K > 1: float32[SPLIT_K, tiles, BM * BN]
    arrivals_ptr,  # SPLIT_K > 1: int32[tiles], zero before and after
    T,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    EPILOGUE: tl.constexpr,
    SPLIT_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    Q_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    PDL: tl.constexpr,
    NUM_SQUARES: tl.constexpr,
    SQUARES_STRIDE: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    m, n, k = tl.arange(0, BM), tile * BN + tl.arange(0, BN), tl.arange(0, BK)
    steps: tl.constexpr = (K + BK * SPLIT_K - 1) // (BK * SPLIT_K)
    first = part * steps * BK
    n_safe = tl.where(n < N, n, 0)
    w_rows = w_ptr + n_safe.to(tl.int64)[:, None] * K
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if EPILOGUE == LOGITS:
        source = tl.load(index_ptr + m, mask=m < T, other=0)
    else:
        source = m
    a_rows = a_ptr + source[:, None] * K
    a_mask = (m < T)[:, None]
    if EPILOGUE != RESIDUAL:
        i = tl.arange(0, triton.next_power_of_2(NUM_SQUARES))
        squares = tl.load(
            squares_in_ptr + i[:, None] * SQUARES_STRIDE + source[None, :],
            mask=(i < NUM_SQUARES)[:, None],
            other=0.0,
        )
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        at = first + step * BK + k
        if K % (BK * SPLIT_K) == 0:
            a = tl.load(a_rows + at[None, :], mask=a_mask, other=0.0)
            w = tl.load(w_rows + at[None, :])
        else:
            a = tl.load(a_rows + at[None, :], mask=a_mask & (at < K)[None, :], other=0.0)
            w = tl.load(w_rows + at[None, :], mask=(at < K)[None, :], other=0.0)
        if SWAP:
            acc = tl.dot(w, tl.trans(a), acc)
        else:
            acc = tl.dot(a, tl.trans(w), acc)
    if SWAP:
        acc = tl.trans(acc)
    last = True
    if SPLIT_K > 1:
        tiles = tl.num_programs(0)
        size: tl.constexpr = BM * BN
        cell = m[:, None] * BN + tl.arange(0, BN)[None, :]
        own = parts_ptr + (part * tiles + tile) * size
        tl.store(own + cell, acc)
        tl.debug_barrier()
        last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
        if last:
            tl.debug_barrier()
            acc = tl.zeros((BM, BN), tl.float32)
            for other in tl.static_range(SPLIT_K):
                base = parts_ptr + (other * tiles + tile) * size
                acc += tl.load(base + cell, cache_modifier=".cg")
            tl.store(arrivals_ptr + tile, 0)
    if last:
        mask = a_mask & (n < N)[None, :]
        if EPILOGUE != RESIDUAL:
            scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)[:, None]
            acc *= scale
        if EPILOGUE == RESIDUAL:
            to = out_ptr + m[:, None] * N + n[None, :]
            acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
            tl.store(to, acc, mask=mask)
            acc = tl.where(mask, acc, 0.0)
            to = squares_out_ptr + tile * SQUARES_STRIDE + m
            tl.store(to, tl.sum(acc * acc, axis=1), mask=m < T)
        elif EPILOGUE == SILU:
            gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
            half = tile * (BN // 2) + tl.arange(0, BN // 2)
            to = out_ptr + m[:, None] * (N // 2) + half[None, :]
            tl.store(to, gate * tl.sigmoid(gate) * up, mask=a_mask & (half < N // 2)[None, :])
        elif EPILOGUE == LOGITS:
            to = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
            tl.store(to, acc, mask=mask)
        else:
            if HAS_BIAS:
                acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            kv_size: tl.constexpr = KV_HEADS * HEAD_DIM
            positions = tl.load(positions_ptr + m, mask=m < T, other=0)
            if tile * BN < Q_SIZE + kv_size:  # Q_SIZE and kv_size are multiples of BN
                acc = _rotate(acc, positions, n, frequencies_ptr, HEAD_DIM, BM, BN)
            if tile * BN < Q_SIZE:
                tl.store(out_ptr + m[:, None] * Q_SIZE + n[None, :], acc, mask=mask)
            else:
                is_value = tile * BN >= Q_SIZE + kv_size
                column = n - Q_SIZE - tl.where(is_value, kv_size, 0)
                slots = tl.load(kv_slots_ptr + m, mask=m < T, other=-1)
                page = slots // PAGE * 2 + tl.where(is_value, 1, 0)
                to = (page[:, None] * KV_HEADS + column[None, :] // HEAD_DIM).to(tl.int64) * PAGE
                to = (to + (slots % PAGE)[:, None]) * HEAD_DIM + (column % HEAD_DIM)[None, :]
                tl.store(kv_ptr + to, acc, mask=mask & (slots >= 0)[:, None])
