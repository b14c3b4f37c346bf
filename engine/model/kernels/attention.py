"""Paged attention for rows of one token (decode) and of many (prefill) in one launch.

Programs 0 .. SPLITS * R * KV_HEADS serve rows of one token: each takes a part of the context for
all query heads that share a KV head; the last part to arrive merges them in a fixed order. The
programs behind them serve chunks of BLOCK_Q tokens of longer rows, found through a work list.
Lengths come from memory: a program without work returns at once. PARTS says which of the two a
launch serves: programs of one kind alone are smaller, so that more of them are at work.

With `PDL` a program starts while the kernel in front still runs, and looks its row and its pages up
before it waits: the scheduler's tables do not change during a pass.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _pages(table, chunk, end, PAGE: tl.constexpr, CHUNK: tl.constexpr):
    """Numbers of the pages from position `chunk` on."""
    numbers = chunk // PAGE + tl.arange(0, CHUNK)
    return tl.load(table + numbers, mask=numbers * PAGE < end, other=0)


@triton.jit
def _attend(q, m_i, l_i, acc, pages, table, kv_ptr, head, start, end, visible,
            KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
            BLOCK_N: tl.constexpr, STAGES: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Softmax state of `q` (already scaled) after keys [start, end); query i sees visible[i].

    Pages are looked up CHUNK at once, the first ones by the caller: keys and values whose place is
    known are asked for STAGES - 1 blocks ahead, those whose page must be loaded first are not.
    """
    d, offsets = tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_N)
    for chunk in range(start, end, CHUNK * PAGE):
        until = tl.minimum(chunk + CHUNK * PAGE, end)
        for at in tl.range(chunk, until, BLOCK_N, num_stages=STAGES):
            position = at + offsets
            inside = position < until
            # Loads are begun for blocks behind the last one, too, though masked.
            number = tl.minimum((position - chunk) // PAGE, CHUNK - 1)
            page = tl.gather(pages, number, 0).to(tl.int64)
            line = (page * (2 * KV_HEADS) + head) * PAGE + position % PAGE
            where = line[:, None] * HEAD_DIM + d[None, :]
            key = tl.load(kv_ptr + where, mask=inside[:, None], other=0.0)
            value = tl.load(
                kv_ptr + KV_HEADS * PAGE * HEAD_DIM + where, mask=inside[:, None], other=0.0
            )
            scores = tl.dot(q, tl.trans(key))
            seen = inside[None, :] & (position[None, :] < visible[:, None])
            scores = tl.where(seen, scores, -1e30)
            m_new = tl.maximum(m_i, tl.max(scores, axis=1))
            weights = tl.where(seen, tl.exp2(scores - m_new[:, None]), 0.0)
            shrink = tl.exp2(m_i - m_new)
            l_i = l_i * shrink + tl.sum(weights, axis=1)
            acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None])
            m_i = m_new
        pages = _pages(table, until, end, PAGE, CHUNK)
    return m_i, l_i, acc


@triton.jit
def paged_attention(
    q_ptr,  # [T, KV_HEADS * GROUP, HEAD_DIM], rotated
    kv_ptr,  # the layer's KV, [pages, 2, KV_HEADS, PAGE, HEAD_DIM]
    out_ptr,  # like q
    plan_ptr,  # int32 view of PLAN
    rows_ptr,  # int32 view of ROW, 16 each
    tables_ptr,  # int32[num_seqs, max_pages]
    work_ptr,  # int32[1 + 2 * items]: number of items, then (row, first token within it)
    parts_ptr,  # float32[SPLITS, R * KV_HEADS, GROUP_PAD * (HEAD_DIM + 2)]
    arrivals_ptr,  # int32[R * KV_HEADS], zero before and after
    scale,  # of the scores, times log2(e)
    max_pages,
    R,  # rows that the grid is for
    most_programs,  # contexts are divided as long as there are no more programs at work than this
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr,  # a part is at least this many blocks of keys
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries (token, head) of a prefill program
    GROUP_PAD: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    PARTS: tl.constexpr,  # BOTH, DECODE or PREFILL
    CHUNK: tl.constexpr,  # pages looked up at once
):
    if PARTS == 2:
        pid = tl.program_id(0) + SPLITS * R * KV_HEADS
    else:
        pid = tl.program_id(0)
    d = tl.arange(0, HEAD_DIM)
    num_decode = SPLITS * R * KV_HEADS
    pair = pid % (R * KV_HEADS)
    part, row, head = pid // (R * KV_HEADS), pair // KV_HEADS, pair % KV_HEADS
    num_rows = tl.load(plan_ptr)
    is_here = (pid < num_decode) & (row < num_rows)
    row = tl.where(is_here, row, 0)
    count = tl.load(rows_ptr + row * 16 + 2)
    seq = tl.load(rows_ptr + row * 16).to(tl.int64)
    token = tl.load(rows_ptr + row * 16 + 1)
    context = tl.load(rows_ptr + row * 16 + 3) + 1
    blocks = tl.cdiv(context, BLOCK_N)
    room = tl.maximum(most_programs // (tl.maximum(num_rows, 1) * KV_HEADS), 1)
    wanted = tl.minimum(tl.minimum(tl.cdiv(blocks, LEAST_BLOCKS), SPLITS), room)
    each = tl.cdiv(blocks, wanted)
    parts = tl.cdiv(blocks, each)
    start = part * each * BLOCK_N
    end = tl.minimum(start + each * BLOCK_N, context)
    is_decode = is_here & (count == 1) & (part < parts)
    table = tables_ptr + seq * max_pages
    pages = _pages(table, start, tl.where(is_decode, end, 0), PAGE, CHUNK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if PARTS != 2 and pid < num_decode:
        if is_decode:
            g = tl.arange(0, GROUP_PAD)
            q_at = (token * KV_HEADS * GROUP + head * GROUP + g)[:, None] * HEAD_DIM + d[None, :]
            used = (g < GROUP)[:, None]
            q = tl.load(q_ptr + q_at, mask=used, other=0.0)
            q = (q.to(tl.float32) * scale).to(q.dtype)
            m_i = tl.full((GROUP_PAD,), -1e30, tl.float32)
            l_i = tl.zeros((GROUP_PAD,), tl.float32)
            acc = tl.zeros((GROUP_PAD, HEAD_DIM), tl.float32)
            visible = tl.full((GROUP_PAD,), 1 << 30, tl.int32)
            m_i, l_i, acc = _attend(q, m_i, l_i, acc, pages, table, kv_ptr, head, start, end,
                                    visible, KV_HEADS, HEAD_DIM, PAGE, BLOCK_N, STAGES,
                                    CHUNK)  # fmt: skip
            if parts == 1:
                tl.store(out_ptr + q_at, acc / l_i[:, None], mask=used)
            else:
                size: tl.constexpr = GROUP_PAD * (HEAD_DIM + 2)
                cell = g[:, None] * HEAD_DIM + d[None, :]
                own = parts_ptr + (part * (R * KV_HEADS) + pair) * size
                tl.store(own + cell, acc)
                tl.store(own + GROUP_PAD * HEAD_DIM + g, m_i)
                tl.store(own + GROUP_PAD * (HEAD_DIM + 1) + g, l_i)
                tl.debug_barrier()
                if tl.atomic_add(arrivals_ptr + pair, 1, sem="acq_rel") == parts - 1:
                    tl.debug_barrier()
                    m_i = tl.full((GROUP_PAD,), -1e30, tl.float32)
                    l_i = tl.zeros((GROUP_PAD,), tl.float32)
                    acc = tl.zeros((GROUP_PAD, HEAD_DIM), tl.float32)
                    for other in range(parts):
                        base = parts_ptr + (other * (R * KV_HEADS) + pair) * size
                        m_o = tl.load(base + GROUP_PAD * HEAD_DIM + g, cache_modifier=".cg")
                        l_o = tl.load(base + GROUP_PAD * (HEAD_DIM + 1) + g,
                                      cache_modifier=".cg")  # fmt: skip
                        a_o = tl.load(base + cell, cache_modifier=".cg")
                        m_new = tl.maximum(m_i, m_o)
                        own_shrink, shrink = tl.exp2(m_i - m_new), tl.exp2(m_o - m_new)
                        l_i = l_i * own_shrink + l_o * shrink
                        acc = acc * own_shrink[:, None] + a_o * shrink[:, None]
                        m_i = m_new
                    tl.store(out_ptr + q_at, acc / l_i[:, None], mask=used)
                    tl.store(arrivals_ptr + pair, 0)
    elif PARTS != 1:
        item, head = (pid - num_decode) // KV_HEADS, (pid - num_decode) % KV_HEADS
        if item < tl.load(work_ptr):
            block_q: tl.constexpr = BLOCK_M // GROUP
            row = tl.load(work_ptr + 1 + 2 * item)
            offset = tl.load(work_ptr + 2 + 2 * item)
            seq = tl.load(rows_ptr + row * 16).to(tl.int64)
            token = tl.load(rows_ptr + row * 16 + 1) + offset
            left = tl.load(rows_ptr + row * 16 + 2) - offset
            position = tl.load(rows_ptr + row * 16 + 3) + offset
            i = tl.arange(0, BLOCK_M)
            here, member = i // GROUP, i % GROUP
            used = ((here < block_q) & (here < left))[:, None]
            q_at = ((token + here) * (KV_HEADS * GROUP) + head * GROUP + member)[:, None] * HEAD_DIM
            q_at += d[None, :]
            q = tl.load(q_ptr + q_at, mask=used, other=0.0)
            q = (q.to(tl.float32) * scale).to(q.dtype)
            m_i = tl.full((BLOCK_M,), -1e30, tl.float32)
            l_i = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
            end = position + tl.minimum(left, block_q)
            visible = position + here + 1
            table = tables_ptr + seq * max_pages
            pages = _pages(table, 0, end, PAGE, CHUNK)
            m_i, l_i, acc = _attend(q, m_i, l_i, acc, pages, table, kv_ptr, head, 0, end,
                                    visible, KV_HEADS, HEAD_DIM, PAGE, BLOCK_N, STAGES,
                                    CHUNK)  # fmt: skip
            tl.store(out_ptr + q_at, acc / l_i[:, None], mask=used)
