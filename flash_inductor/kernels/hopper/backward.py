# mypy: disallow-untyped-defs=False
"""Attention backward on Hopper for head dims up to 128: one block of keys against all queries that see it.

A CTA owns 128 keys and values.  Three warpgroups, each with a program of its own:

    main 0, main 1   64 keys each; they never wait for each other
                         S = K Q^T -> P -> dP = V dO^T, dV += P dO -> dS -> to shared memory; dK += dS Q, next S
    dq               loads by TMA; dQ = dS K of both mains -> added to the fp32 accumulator by TMA reduce-add; in
                     ``backward_dq``

          load Q dO ──full──▶ main ──dS full──▶ dq          (a ring of STAGES query blocks, a ring of DS_BUFFERS dS)
             ▲────────empty────┘ ▲─────empty─────┘

S, dP, dS are kept transposed, [keys, queries], so that P and dS are register operands of dV and dK.  Measured on an
H200, head dim 128, 4096 long, unless said otherwise:

    dQ in a warpgroup of its own            511 -> 554 TFLOP/s; with one program for all, both mains stop at every dS
    dQ accumulator in register order        1.92 -> 1.80 Mcycles: no bank conflicts; ``around.finish_kernel`` undoes it
    three stages of Q and dO, not two       +3 to +13 %
    two buffers of dS, not one              up to +10 %
    softcap's p (1 - t^2) parked in the dS buffer, not in registers: 339 -> 459 TFLOP/s (no serialised wgmma)

Deterministic mode.  The CTAs of one head add to a block of dQ in the order of their key blocks, each after it has seen
its predecessor's number in ``turns`` (a CTA waits only for CTAs with smaller program ids, which the hardware starts
first: it can't deadlock).  Queries go from last to first: with a window, where ranges of neighbours are shifted, nobody
waits then, and without one each CTA runs one block behind its predecessor, whose longest is first as otherwise.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward_dq import dq_program
from .device import accumulator, pack16, pin16, tanh, tma_store, unpack16


@gluon.jit
def _scores(a, b, zero, FIRST: gl.constexpr, SECOND: gl.constexpr):
    """a b^T over the columns that hold something."""
    s = warpgroup_mma(
        a.slice(0, FIRST, dim=1), b.slice(0, FIRST, dim=1).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    if SECOND:
        s = warpgroup_mma(
            a.slice(FIRST, SECOND, dim=1), b.slice(FIRST, SECOND, dim=1).permute((1, 0)), s, is_async=True
        )
    return s


@gluon.jit
def _hand_over(ds16, ds_smem, ds_full, ds_empty, it, W: gl.constexpr, DS_BUFFERS: gl.constexpr, PARK: gl.constexpr):
    """dS of block ``it`` to the dq warpgroup."""
    buf = it % DS_BUFFERS
    if not PARK:  # with it, the buffer is ours already
        mbarrier.wait(ds_empty.index(buf), ((it // DS_BUFFERS) & 1) ^ 1)
    ds_smem.index(2 * buf + W).store(ds16)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(2 * buf + W), count=1)


@gluon.jit
def _main_program(
    W: gl.constexpr, dk_desc, dv_desc, k_smem, v_smem, q_bufs, ds_smem, bars, place, band, numbers,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr,
    STAGES: gl.constexpr, DS_BUFFERS: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr,
    RAGGED: gl.constexpr, SOFTCAP: gl.constexpr, AHEAD: gl.constexpr, PARK: gl.constexpr,
):  # fmt: skip
    """dK and dV of half W of the keys.

    AHEAD: the next S is begun before this block's P, and dK is still in flight during the next block's, so that the
    tensor cores have work during the exponentials; takes 32 registers that head dims above 64 don't have.

    PARK: P, or with a softcap its slope, waits for dP in the dS buffer, not in registers; always with SOFTCAP.
    """
    kv_full, q_full, do_full, empty, ds_full, ds_empty = bars
    batch, kv_head, block_n, _heads, group, _rows = place
    kv_len, lower, upper, m_first, m_step, m_blocks = band
    score_scale, scale, cap = numbers
    q_smem, do_smem, lse_smem, delta_smem = q_bufs
    HALF: gl.constexpr = BLOCK_N // 2
    dtype: gl.constexpr = dk_desc.dtype
    s_layout: gl.constexpr = accumulator(BLOCK_M)
    operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    cols: gl.constexpr = gl.SliceLayout(0, s_layout)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    n = block_n * BLOCK_N + W * HALF
    dk = gl.zeros([HALF, FIRST], gl.float32, accumulator(FIRST))
    dv = gl.zeros([HALF, FIRST], gl.float32, accumulator(FIRST))
    if SECOND:
        dk2 = gl.zeros([HALF, SECOND], gl.float32, accumulator(SECOND))
        dv2 = gl.zeros([HALF, SECOND], gl.float32, accumulator(SECOND))
    zero = gl.zeros([HALF, BLOCK_M], gl.float32, s_layout)
    total = group * m_blocks
    if total > 0:
        mbarrier.wait(kv_full.index(0), 0)
        mbarrier.wait(q_full.index(0), 0)
        k = k_smem.index(W).reshape([HALF, DIM])
        s = warpgroup_mma_wait(0, [_scores(k, q_smem.index(0).reshape([BLOCK_M, DIM]), zero, FIRST, SECOND)])
        packed = pack16(zero.to(dtype))
        i = 0
        for it in range(total):
            stage = it % STAGES
            phase = (it // STAGES) & 1
            buf = it % DS_BUFFERS
            next_stage = (it + 1) % STAGES
            # Always 0, but the compiler can't know: else it hoists addresses out of the loop and spills them.
            zero_index = it >> 24
            k = k_smem.index(zero_index + W).reshape([HALF, DIM])
            v = v_smem.index(zero_index + W).reshape([HALF, DIM])
            do = do_smem.index(stage).reshape([BLOCK_M, DIM])
            q_next = q_smem.index(next_stage).reshape([BLOCK_M, DIM])
            if AHEAD:
                # dK of the block before; zeros before the first.
                q_last = q_smem.index(gl.maximum(it - 1, 0) % STAGES).reshape([BLOCK_M, DIM])
                ds_operand = gl.convert_layout(unpack16(packed, dtype), operand)
                dk = warpgroup_mma(ds_operand, q_last.slice(0, FIRST, dim=1), dk, is_async=True)
                if SECOND:
                    dk2 = warpgroup_mma(ds_operand, q_last.slice(FIRST, SECOND, dim=1), dk2, is_async=True)
                # After the last block on a stale one: cheaper than another copy of the loop body.
                mbarrier.wait(q_full.index(next_stage), ((it + 1) // STAGES) & 1, pred=it + 1 < total)
                s_next = _scores(k, q_next, zero, FIRST, SECOND)
            lse = lse_smem.index(stage).reshape([BLOCK_M]).load(cols)
            if SOFTCAP:
                t = tanh(s * score_scale, dtype)
                s = t * cap
            if HAS_UPPER or HAS_LOWER or RAGGED:
                m = m_first + i * m_step
                masked = False
                if HAS_UPPER:
                    masked = masked | (n + HALF - 1 > m + upper)
                if HAS_LOWER:
                    masked = masked | (n < m + BLOCK_M - 1 + lower)
                if RAGGED:
                    masked = masked | (n + HALF > kv_len)
                if masked:
                    key = n + gl.arange(0, HALF, rows)
                    query = m + gl.arange(0, BLOCK_M, cols)
                    if HAS_UPPER:
                        s = gl.where(key[:, None] <= query[None, :] + upper, s, float("-inf"))
                    if HAS_LOWER:
                        s = gl.where(key[:, None] >= query[None, :] + lower, s, float("-inf"))
                    if RAGGED:
                        s = gl.where(key[:, None] < kv_len, s, float("-inf"))
            if SOFTCAP:
                p = gl.exp2(s - lse[None, :])
                p16 = p.to(dtype)
                mbarrier.wait(ds_empty.index(buf), ((it // DS_BUFFERS) & 1) ^ 1)
                ds_smem.index(2 * buf + W).store((p * (1.0 - t * t)).to(dtype))
            else:
                p16 = gl.exp2(s * score_scale - lse[None, :]).to(dtype)
                if PARK:
                    mbarrier.wait(ds_empty.index(buf), ((it // DS_BUFFERS) & 1) ^ 1)
                    ds_smem.index(2 * buf + W).store(p16)
            # All of P is 16 bit before dP may begin: S and dP don't both live in full.
            p16 = pin16(p16)
            mbarrier.wait(do_full.index(stage), phase)
            dp = _scores(v, do, zero, FIRST, SECOND)
            p_operand = gl.convert_layout(p16, operand)
            dv = warpgroup_mma(p_operand, do.slice(0, FIRST, dim=1), dv, is_async=True)
            if SECOND:
                dv2 = warpgroup_mma(p_operand, do.slice(FIRST, SECOND, dim=1), dv2, is_async=True)
            delta = delta_smem.index(stage).reshape([BLOCK_M]).load(cols)
            if AHEAD:
                if SECOND:
                    dp, dk, dk2, s = warpgroup_mma_wait(2, [dp, dk, dk2, s_next])
                else:
                    dp, dk, s = warpgroup_mma_wait(1, [dp, dk, s_next])
                if it > 0:
                    mbarrier.arrive(empty.index((it - 1) % STAGES), count=1)
            else:
                dp = warpgroup_mma_wait(2 if SECOND else 1, [dp])
            slope = ds_smem.index(2 * buf + W).load(s_layout) if PARK else p16
            ds = slope.to(gl.float32) * (dp - delta[None, :])
            ds16 = ds.to(dtype)
            # dS takes longer than dV: this wait is free and releases P's registers.
            if SECOND:
                dv, dv2 = warpgroup_mma_wait(0, [dv, dv2])
            else:
                dv = warpgroup_mma_wait(0, [dv])
            _hand_over(ds16, ds_smem, ds_full, ds_empty, it, W, DS_BUFFERS, PARK)
            if AHEAD:
                packed = pack16(ds16)
            else:
                q = q_smem.index(stage).reshape([BLOCK_M, DIM])
                ds_operand = gl.convert_layout(ds16, operand)
                dk = warpgroup_mma(ds_operand, q.slice(0, FIRST, dim=1), dk, is_async=True)
                if SECOND:
                    dk2 = warpgroup_mma(ds_operand, q.slice(FIRST, SECOND, dim=1), dk2, is_async=True)
                mbarrier.wait(q_full.index(next_stage), ((it + 1) // STAGES) & 1, pred=it + 1 < total)
                s = _scores(k, q_next, zero, FIRST, SECOND)
                if SECOND:
                    dk, dk2, s = warpgroup_mma_wait(0, [dk, dk2, s])
                else:
                    dk, s = warpgroup_mma_wait(0, [dk, s])
                mbarrier.arrive(empty.index(stage), count=1)
            i += 1
            if i == m_blocks:
                i = 0
        if AHEAD:
            q_last = q_smem.index((total - 1) % STAGES).reshape([BLOCK_M, DIM])
            ds_operand = gl.convert_layout(unpack16(packed, dtype), operand)
            dk = warpgroup_mma(ds_operand, q_last.slice(0, FIRST, dim=1), dk)
            if SECOND:
                dk2 = warpgroup_mma(ds_operand, q_last.slice(FIRST, SECOND, dim=1), dk2)
        # K is still an operand of the last dQ.
        mbarrier.wait(ds_empty.index((total - 1) % DS_BUFFERS), ((total - 1) // DS_BUFFERS) & 1)
    v_tile = v_smem.index(W).reshape([HALF, DIM])
    v_tile.slice(0, FIRST, dim=1).store(dv.to(dtype))
    if SECOND:
        v_tile.slice(FIRST, SECOND, dim=1).store(dv2.to(dtype))
    fence_async_shared()
    tma_store(dv_desc, [batch, kv_head, n, 0], v_smem.index(W))
    k_tile = k_smem.index(W).reshape([HALF, DIM])
    k_tile.slice(0, FIRST, dim=1).store((dk * scale).to(dtype))
    if SECOND:
        k_tile.slice(FIRST, SECOND, dim=1).store((dk2 * scale).to(dtype))
    fence_async_shared()
    tma_store(dk_desc, [batch, kv_head, n, 0], k_smem.index(W))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[
    "heads", "kv_heads", "group", "batch_kv_heads", "heads_at_once", "blocks_n", "q_len", "q_rows", "kv_len",
    "lower", "upper",
])  # fmt: skip
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_desc, dk_desc, dv_desc, turns,
    heads, kv_heads, group, batch_kv_heads, heads_at_once, blocks_n, q_len, q_rows, kv_len, lower, upper,
    score_scale, scale, cap,
    HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr, RAGGED: gl.constexpr, SOFTCAP: gl.constexpr,
    DETERMINISTIC: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr,
    FIRST: gl.constexpr, SECOND: gl.constexpr, STAGES: gl.constexpr, DS_BUFFERS: gl.constexpr, AHEAD: gl.constexpr,
    PARK: gl.constexpr, MAIN_REGISTERS: gl.constexpr, DQ_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (blocks of keys * batch * key heads,), 4 warps (of the first main; the rest is added by Gluon).

    Args:
        q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc: tiles [1, 1, BLOCK_M or BLOCK_N / 2, DIM], DIM 64 or 128 and
            not below the head dim.
        lse_desc, delta_desc: fp32 [batch * heads, q_rows] in boxes of BLOCK_M, lse in log2 units; q_rows is q_len
            rounded up to 128, the rows beyond q_len hold finite numbers.
        dq_desc: fp32 accumulator [batch, heads, q_rows, DIM] of zeros, as a flat tensor in boxes of 16 x 256.  Each
            64 x 64 tile is in the order of its registers, see ``around.finish_kernel``.
        turns: int32 [batch * heads * q_rows / 64] of zeros if DETERMINISTIC, else unused.
        group: query heads that share a key head; dK and dV are summed over them in fp32 registers.
        heads_at_once: key heads that are worked on together: inside such a group, key blocks come in order (the
            longest of a causal mask first), heads innermost.
        lower, upper: the band, read if HAS_LOWER / HAS_UPPER.
        score_scale: scale / softcap with SOFTCAP, else scale * log2(e).  cap: softcap * log2(e).
        FIRST, SECOND: the head dim's columns as one or two powers of two (SECOND may be 0): 64 + 32 products of a tile
            of 128 columns cost less than 128, and leave registers for AHEAD.
        RAGGED: kv_len isn't a multiple of BLOCK_N, and no bound hides what is behind it.
    """
    dtype: gl.constexpr = q_desc.dtype
    pid = gl.program_id(0)
    per_group = heads_at_once * blocks_n
    first = pid // per_group * heads_at_once
    size = gl.minimum(heads_at_once, batch_kv_heads - first)
    block_n = pid % per_group // size
    batch_head = first + pid % per_group % size
    batch = batch_head // kv_heads
    kv_head = batch_head % kv_heads
    k_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_N // 2, DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_N // 2, DIM], v_desc.layout)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, DIM], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, DIM], do_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], delta_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N // 2, BLOCK_M], dtype)
    ds_smem = gl.allocate_shared_memory(dtype, [2 * DS_BUFFERS, BLOCK_N // 2, BLOCK_M], ds_layout)
    dq_smem = gl.allocate_shared_memory(gl.float32, [DIM // 64, 16, 256], dq_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [2 * DS_BUFFERS, 1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [DS_BUFFERS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(DS_BUFFERS):
        mbarrier.init(ds_full.index(2 * i), count=1)
        mbarrier.init(ds_full.index(2 * i + 1), count=1)
        mbarrier.init(ds_empty.index(i), count=1)
    # Queries that see a key of this block.
    m_begin = 0
    m_end = q_len
    if HAS_UPPER:
        m_begin = gl.maximum(block_n * BLOCK_N - upper, 0) // BLOCK_M * BLOCK_M
    if HAS_LOWER:
        m_end = gl.minimum(q_len, (block_n + 1) * BLOCK_N - lower)
    m_blocks = gl.maximum((m_end - m_begin + BLOCK_M - 1) // BLOCK_M, 0)
    m_first = m_begin
    m_step = BLOCK_M
    if DETERMINISTIC:
        m_first = m_begin + (m_blocks - 1) * BLOCK_M
        m_step = -BLOCK_M
    bars = (kv_full, q_full, do_full, empty, ds_full, ds_empty)
    place = (batch, kv_head, block_n, heads, group, q_rows)
    band = (kv_len, lower, upper, m_first, m_step, m_blocks)
    numbers = (score_scale, scale, cap)
    q_descs = (q_desc, do_desc, lse_desc, delta_desc)
    q_bufs = (q_smem, do_smem, lse_smem, delta_smem)
    gl.warp_specialize([
        (_main_program, (0, dk_desc, dv_desc, k_smem, v_smem, q_bufs, ds_smem, bars, place, band, numbers,
                         BLOCK_M, BLOCK_N, DIM, FIRST, SECOND, STAGES, DS_BUFFERS, HAS_LOWER, HAS_UPPER, RAGGED,
                         SOFTCAP, AHEAD, PARK)),
        (_main_program, (1, dk_desc, dv_desc, k_smem, v_smem, q_bufs, ds_smem, bars, place, band, numbers,
                         BLOCK_M, BLOCK_N, DIM, FIRST, SECOND, STAGES, DS_BUFFERS, HAS_LOWER, HAS_UPPER, RAGGED,
                         SOFTCAP, AHEAD, PARK)),
        (dq_program, (q_descs, k_desc, v_desc, dq_desc, turns, k_smem, v_smem, q_bufs, ds_smem, dq_smem, bars, place,
                       band, BLOCK_M, BLOCK_N, DIM, STAGES, DS_BUFFERS, DETERMINISTIC, HAS_LOWER)),
    ], [4, 4], [MAIN_REGISTERS, DQ_REGISTERS])  # fmt: skip
