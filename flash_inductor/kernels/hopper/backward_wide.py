# mypy: disallow-untyped-defs=False
"""Attention backward on Hopper for head dims above 128: one block of keys against all queries that see it.

A step is a block of 64 keys and one of 64 queries.  dK and dV of 64 keys take 128 registers a thread each at head dim
256, so each has a warpgroup of its own, and P has to go through shared memory.  A third one has dQ:

    value   S = K Q^T -> P          -> dV += P dO     loads K, then dO
                         |  P
    key     dP = V dO^T -> dS       -> dK += dS Q     loads V, then Q
                            |  dS
    query                  dQ = dS^T K -> added to the fp32 accumulator by TMA reduce-add

The three are a step apart from each other (P and dS have one buffer each) and run S and dP of the next step beside dV
and dK of this one, so that the tensor cores have work during the elementwise parts.  Stages of Q are freed by dK, the
last to read them (S was there before, P proves it), those of dO by dV, unless dP is later: the warpgroup that frees a
stage loads the next tile into it.  A producer warp would take registers that are short here: 504 for the three.

The second level cache seems to bound it: 3.1 TB/s of dQ are added there on an H200, at head dims 192/128 as at 256 (1.9
in ``backward``, whose blocks of 128 keys add half as often; two of them have no room here).  None of these changed the
time at 192/128 by more than 1 %: dQ added from registers (``red.v4.f32``) instead of by TMA, S and dP begun a block
ahead of the elementwise parts, two parts of dQ in flight, six buffers for them.

As in ``backward``: S, dP, dS are kept transposed, the accumulator of dQ in register order, and the order of the CTAs,
of the queries and of the sums of deterministic mode is the same.
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

from .device import accumulator, pin16, tanh, tma_reduce_add
from .turns import await_turn, pass_turn
from .wide_pieces import (
    BLOCK,
    add,
    load_query,
    load_tile,
    next_block,
    over_columns,
    store_sum,
    wait_sum,
    zeros,
)

_thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # renamed in Triton 3.7


@gluon.jit
def _value_program(
    q_descs, k_desc, do_desc, dv_desc, q_bufs, k_smem, do_smem, p_smem, bars, place, band, numbers,
    QK_FIRST: gl.constexpr, QK_SECOND: gl.constexpr, V_FIRST: gl.constexpr, V_SECOND: gl.constexpr,
    STAGES: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr, RAGGED: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    k_full, q_full, do_full, do_empty, p_full, p_empty = bars
    batch, kv_head, n, heads, group = place
    kv_len, lower, upper, m_first, m_step, m_blocks = band
    score_scale, cap = numbers
    q_smem, lse_smem, _delta = q_bufs
    dtype: gl.constexpr = dv_desc.dtype
    DIM: gl.constexpr = k_desc.block_shape[3]
    V_DIM: gl.constexpr = do_desc.block_shape[3]
    s_layout: gl.constexpr = accumulator(64)
    cols: gl.constexpr = gl.SliceLayout(0, s_layout)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    zero = gl.zeros([BLOCK, BLOCK], gl.float32, s_layout)
    dv = zeros(V_FIRST)
    dv_second = zeros(V_SECOND)
    total = group * m_blocks
    last = 0
    if total > 0:
        load_tile(k_desc, k_smem, k_full, 0, batch, kv_head, n)
        load_g = 0  # of the next load
        load_i = 0
        for it in range(gl.minimum(STAGES, total)):
            head = kv_head * group + load_g
            load_query(q_descs, q_bufs, q_full, it, batch, head, batch * heads + head, m_first + load_i * m_step)
            load_g, load_i = next_block(load_g, load_i, m_blocks)
        mbarrier.wait(k_full, 0)
        mbarrier.wait(q_full.index(0), 0)
        k = k_smem.index(0).reshape([BLOCK, DIM])
        s = over_columns(k, q_smem.index(0).reshape([BLOCK, DIM]), zero, QK_FIRST, QK_SECOND)
        s = warpgroup_mma_wait(0, [s])
        i = 0
        for it in range(total):
            stage = it % STAGES
            phase = (it // STAGES) & 1
            next_stage = (it + 1) % STAGES
            # Always 0, but the compiler can't know: else it hoists addresses out of the loop and spills them.
            zero_index = it >> 24
            k = k_smem.index(zero_index).reshape([BLOCK, DIM])
            lse = lse_smem.index(stage).reshape([BLOCK]).load(cols)
            hidden = float("-inf")
            if SOFTCAP:
                s = tanh(s * score_scale, dtype)
                # Below any visible score by enough for P to be 0, and finite: 0 * (1 - hidden^2) is 0.
                hidden = -1.0 - 300.0 / cap
            if HAS_UPPER or HAS_LOWER or RAGGED:
                m = m_first + i * m_step
                masked = False
                if HAS_UPPER:
                    masked = masked | (n + BLOCK - 1 > m + upper)
                if HAS_LOWER:
                    masked = masked | (n < m + BLOCK - 1 + lower)
                if RAGGED:
                    masked = masked | (n + BLOCK > kv_len)
                if masked:
                    key = n + gl.arange(0, BLOCK, rows)
                    query = m + gl.arange(0, BLOCK, cols)
                    if HAS_UPPER:
                        s = gl.where(key[:, None] <= query[None, :] + upper, s, hidden)
                    if HAS_LOWER:
                        s = gl.where(key[:, None] >= query[None, :] + lower, s, hidden)
                    if RAGGED:
                        s = gl.where(key[:, None] < kv_len, s, hidden)
            if SOFTCAP:
                p = gl.exp2(s * cap - lse[None, :])
                slope = (p * (1.0 - s * s)).to(dtype)  # of the softcap, times P: what dS needs
                p16 = p.to(dtype)
            else:
                p16 = gl.exp2(s * score_scale - lse[None, :]).to(dtype)
                slope = p16
            mbarrier.wait(p_empty, (it & 1) ^ 1)
            p_smem.index(zero_index).store(slope)
            mbarrier.arrive(p_full, count=1)
            p16 = pin16(p16)
            mbarrier.wait(do_full.index(stage), phase)
            do = do_smem.index(stage).reshape([BLOCK, V_DIM])
            dv, dv_second = add(dv, dv_second, p16, do, V_FIRST, V_SECOND)
            # After the last block on a stale one: cheaper than another copy of the loop body.
            mbarrier.wait(q_full.index(next_stage), ((it + 1) // STAGES) & 1, pred=it + 1 < total)
            s = over_columns(k, q_smem.index(next_stage).reshape([BLOCK, DIM]), zero, QK_FIRST, QK_SECOND)
            dv, dv_second = wait_sum(dv, dv_second, V_SECOND, QK_SECOND)
            if it + STAGES < total:
                _thread_barrier()  # all four warps' parts of dV have left the stage
                mbarrier.wait(do_empty.index(stage), phase)
                head = kv_head * group + load_g
                load_tile(do_desc, do_smem, do_full.index(stage), stage, batch, head, m_first + load_i * m_step)
                load_g, load_i = next_block(load_g, load_i, m_blocks)
            s = warpgroup_mma_wait(0, [s])
            i += 1
            if i == m_blocks:
                i = 0
        last = (total - 1) % STAGES
        _thread_barrier()
        mbarrier.wait(do_empty.index(last), ((total - 1) // STAGES) & 1)
    store_sum(dv_desc, do_smem.index(last), dv, dv_second, batch, kv_head, n, V_FIRST, V_SECOND)


@gluon.jit
def _key_program(
    q_descs, v_desc, do_desc, dk_desc, q_bufs, v_smem, do_smem, p_smem, ds_smem, bars, place, band, scale,
    QK_FIRST: gl.constexpr, QK_SECOND: gl.constexpr, V_FIRST: gl.constexpr, V_SECOND: gl.constexpr,
    STAGES: gl.constexpr, DS_IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    v_full, q_full, do_full, do_empty, p_full, p_empty, ds_full, ds_empty = bars
    batch, kv_head, n, heads, group = place
    _len, _lower, _upper, m_first, m_step, m_blocks = band
    q_smem, _lse, delta_smem = q_bufs
    dtype: gl.constexpr = dk_desc.dtype
    DIM: gl.constexpr = dk_desc.block_shape[3]
    V_DIM: gl.constexpr = v_desc.block_shape[3]
    s_layout: gl.constexpr = accumulator(64)
    cols: gl.constexpr = gl.SliceLayout(0, s_layout)
    zero = gl.zeros([BLOCK, BLOCK], gl.float32, s_layout)
    dk = zeros(QK_FIRST)
    dk_second = zeros(QK_SECOND)
    total = group * m_blocks
    last = 0
    if total > 0:
        load_tile(v_desc, v_smem, v_full, 0, batch, kv_head, n)
        load_g = 0  # of the next load
        load_i = 0
        for it in range(gl.minimum(STAGES, total)):
            head = kv_head * group + load_g
            load_tile(do_desc, do_smem, do_full.index(it), it, batch, head, m_first + load_i * m_step)
            load_g, load_i = next_block(load_g, load_i, m_blocks)
        mbarrier.wait(v_full, 0)
        mbarrier.wait(do_full.index(0), 0)
        v = v_smem.index(0).reshape([BLOCK, V_DIM])
        dp = over_columns(v, do_smem.index(0).reshape([BLOCK, V_DIM]), zero, V_FIRST, V_SECOND)
        dp = warpgroup_mma_wait(0, [dp])
        mbarrier.arrive(do_empty.index(0), count=1)
        for it in range(total):
            stage = it % STAGES
            next_stage = (it + 1) % STAGES
            zero_index = it >> 24  # see _value_program
            v = v_smem.index(zero_index).reshape([BLOCK, V_DIM])
            mbarrier.wait(q_full.index(stage), (it // STAGES) & 1)
            delta = delta_smem.index(stage).reshape([BLOCK]).load(cols)
            mbarrier.wait(p_full, it & 1)
            slope = p_smem.index(zero_index).load(s_layout)
            mbarrier.arrive(p_empty, count=1)
            ds = (slope.to(gl.float32) * (dp - delta[None, :])).to(dtype)
            mbarrier.wait(ds_empty, (it & 1) ^ 1)
            ds_smem.index(zero_index).store(ds)
            if not DS_IN_REGISTERS:
                fence_async_shared()
            mbarrier.arrive(ds_full, count=1)
            q = q_smem.index(stage).reshape([BLOCK, DIM])
            dk, dk_second = add(dk, dk_second, ds, q, QK_FIRST, QK_SECOND)
            # After the last block on a stale one.
            mbarrier.wait(do_full.index(next_stage), ((it + 1) // STAGES) & 1, pred=it + 1 < total)
            dp = over_columns(v, do_smem.index(next_stage).reshape([BLOCK, V_DIM]), zero, V_FIRST, V_SECOND)
            dk, dk_second = wait_sum(dk, dk_second, QK_SECOND, V_SECOND)
            if it + STAGES < total:
                _thread_barrier()  # all four warps' parts of dK have left the stage; lse was read before P was written
                head = kv_head * group + load_g
                row_head = batch * heads + head
                load_query(q_descs, q_bufs, q_full, stage, batch, head, row_head, m_first + load_i * m_step)
                load_g, load_i = next_block(load_g, load_i, m_blocks)
            dp = warpgroup_mma_wait(0, [dp])
            mbarrier.arrive(do_empty.index(next_stage), count=1, pred=it + 1 < total)
        last = (total - 1) % STAGES
        _thread_barrier()
    store_sum(dk_desc, q_smem.index(last), dk * scale, dk_second * scale, batch, kv_head, n, QK_FIRST, QK_SECOND)


@gluon.jit
def _query_program(
    dq_desc, turns, k_smem, ds_smem, dq_smem, bars, place, band, q_rows,
    DIM: gl.constexpr, PARTS: gl.constexpr, PART: gl.constexpr, SLOTS: gl.constexpr, DS_IN_REGISTERS: gl.constexpr,
    DETERMINISTIC: gl.constexpr, HAS_LOWER: gl.constexpr,
):  # fmt: skip
    k_full, ds_full, ds_empty = bars
    batch, kv_head, n, heads, group = place
    _len, lower, _upper, m_first, m_step, m_blocks = band
    gl.static_assert(PARTS % SLOTS == 0)  # else the first part of a step takes the slot of the last of the step before
    ROWS: gl.constexpr = BLOCK * PART // 256  # of the flat accumulator, for a part
    dq_layout: gl.constexpr = accumulator(PART)
    operand: gl.constexpr = gl.DotOperandLayout(0, dq_layout, 2)
    zero = gl.zeros([BLOCK, PART], gl.float32, dq_layout)
    total = group * m_blocks
    if total > 0:
        g = 0
        i = 0
        mbarrier.wait(k_full, 0)
        for it in range(total):
            zero_index = it >> 24  # see _value_program
            k = k_smem.index(zero_index).reshape([BLOCK, DIM])
            m = m_first + i * m_step
            block = ((batch * heads + kv_head * group + g) * q_rows + m) // BLOCK
            row = block * (BLOCK * DIM // 256)
            mbarrier.wait(ds_full, it & 1)
            ds = ds_smem.index(zero_index).permute((1, 0))
            if DS_IN_REGISTERS:
                # Read once instead of once a part, and the buffer is free at once.
                ds = ds.load(operand)
                mbarrier.arrive(ds_empty, count=1)
            dq = warpgroup_mma(ds, k.slice(0, PART, dim=1), zero, use_acc=False, is_async=True)
            if DETERMINISTIC:  # noqa: SIM102 (one is known at compile time)
                if it > 0:  # only now: the last sums had the time of a step to arrive
                    back = gl.where(i == 0, q_rows // BLOCK - (m_blocks - 1) * (m_step // BLOCK), m_step // BLOCK)
                    pass_turn(turns + (block - back), n // BLOCK + 1)
            for part in gl.static_range(PARTS):
                tma.store_wait(SLOTS - 1)
                dq = warpgroup_mma_wait(0, [dq])
                if part == PARTS - 1 and not DS_IN_REGISTERS:
                    mbarrier.arrive(ds_empty, count=1)
                # As the registers lie, 16 contiguous bytes a thread.
                x = dq.reshape([4, 2, 8, PART // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
                slot = dq_smem.index(zero_index + part % SLOTS)
                slot.store(x.reshape([ROWS, 256]))
                if part < PARTS - 1:
                    dq = warpgroup_mma(ds, k.slice((part + 1) * PART, PART, dim=1), zero, use_acc=False, is_async=True)
                fence_async_shared()
                if DETERMINISTIC and part == 0:
                    follows = n > 0
                    if HAS_LOWER:
                        follows = follows & (m < n - lower)  # else the predecessor's keys aren't seen from here
                    if follows:
                        await_turn(turns + block, n // BLOCK)
                tma_reduce_add(dq_desc, [row + part * ROWS, 0], slot)
            g, i = next_block(g, i, m_blocks)
        if DETERMINISTIC:
            last_head = batch * heads + kv_head * group + group - 1
            pass_turn(turns + (last_head * q_rows + m_first + (m_blocks - 1) * m_step) // BLOCK, n // BLOCK + 1)
        tma.store_wait(0)


@gluon.jit(do_not_specialize=[
    "heads", "kv_heads", "group", "batch_kv_heads", "heads_at_once", "blocks_n", "q_len", "q_rows", "kv_len",
    "lower", "upper",
])  # fmt: skip
def backward_wide_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_desc, dk_desc, dv_desc, turns,
    heads, kv_heads, group, batch_kv_heads, heads_at_once, blocks_n, q_len, q_rows, kv_len, lower, upper,
    score_scale, scale, cap,
    HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr, RAGGED: gl.constexpr, SOFTCAP: gl.constexpr,
    DETERMINISTIC: gl.constexpr, QK_FIRST: gl.constexpr, QK_SECOND: gl.constexpr, V_FIRST: gl.constexpr,
    V_SECOND: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, PART: gl.constexpr, SLOTS: gl.constexpr,
    DS_IN_REGISTERS: gl.constexpr, KV_REGISTERS: gl.constexpr, DQ_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (blocks of 64 keys * batch * key heads,), 4 warps (of the value program; the rest is added by Gluon).

    Args: as for ``backward.backward_kernel``, but that all tiles have 64 rows, those of q, k and dk 256 and those of v,
    do and dv 128 or 256 columns, and dq_desc boxes of PART / 4 rows.

    QK_FIRST + QK_SECOND, V_FIRST + V_SECOND: columns that hold the head dims, see ``wide_pieces``.

    PART: columns of dQ that are computed and sent at once.  PARTS: how many of them hold the head dim, what is beyond
    is neither computed nor written.  SLOTS: buffers for parts that are on their way; divides PARTS.  STAGES: of Q and
    dO.  DS_IN_REGISTERS: dS is dQ's register operand.
    """
    dtype: gl.constexpr = q_desc.dtype
    DIM: gl.constexpr = q_desc.block_shape[3]
    V_DIM: gl.constexpr = v_desc.block_shape[3]
    pid = gl.program_id(0)
    per_group = heads_at_once * blocks_n
    first = pid // per_group * heads_at_once
    size = gl.minimum(heads_at_once, batch_kv_heads - first)
    n = pid % per_group // size * BLOCK
    batch_head = first + pid % per_group % size
    batch = batch_head // kv_heads
    kv_head = batch_head % kv_heads
    k_smem = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK, DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK, V_DIM], v_desc.layout)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK, DIM], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK, V_DIM], do_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK], delta_desc.layout)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    p_smem = gl.allocate_shared_memory(dtype, [1, BLOCK, BLOCK], p_layout)
    ds_smem = gl.allocate_shared_memory(dtype, [1, BLOCK, BLOCK], p_layout)
    dq_smem = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK * PART // 256, 256], dq_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_empty, count=1)
    mbarrier.init(ds_full, count=1)
    mbarrier.init(ds_empty, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=1)
    # Queries that see a key of this block.
    m_begin = 0
    m_end = q_len
    if HAS_UPPER:
        m_begin = gl.maximum(n - upper, 0) // BLOCK * BLOCK
    if HAS_LOWER:
        m_end = gl.minimum(q_len, n + BLOCK - lower)
    m_blocks = gl.maximum((m_end - m_begin + BLOCK - 1) // BLOCK, 0)
    m_first = m_begin
    m_step = BLOCK
    if DETERMINISTIC:  # see backward
        m_first = m_begin + (m_blocks - 1) * BLOCK
        m_step = -BLOCK
    place = (batch, kv_head, n, heads, group)
    band = (kv_len, lower, upper, m_first, m_step, m_blocks)
    q_descs = (q_desc, lse_desc, delta_desc)
    q_bufs = (q_smem, lse_smem, delta_smem)
    value_bars = (k_full, q_full, do_full, do_empty, p_full, p_empty)
    key_bars = (v_full, q_full, do_full, do_empty, p_full, p_empty, ds_full, ds_empty)
    gl.warp_specialize([
        (_value_program, (q_descs, k_desc, do_desc, dv_desc, q_bufs, k_smem, do_smem, p_smem, value_bars, place, band,
                          (score_scale, cap), QK_FIRST, QK_SECOND, V_FIRST, V_SECOND, STAGES, HAS_LOWER, HAS_UPPER,
                          RAGGED, SOFTCAP)),
        (_key_program, (q_descs, v_desc, do_desc, dk_desc, q_bufs, v_smem, do_smem, p_smem, ds_smem, key_bars, place,
                        band, scale, QK_FIRST, QK_SECOND, V_FIRST, V_SECOND, STAGES, DS_IN_REGISTERS)),
        (_query_program, (dq_desc, turns, k_smem, ds_smem, dq_smem, (k_full, ds_full, ds_empty), place, band, q_rows,
                          DIM, PARTS, PART, SLOTS, DS_IN_REGISTERS, DETERMINISTIC, HAS_LOWER)),
    ], [4, 4], [KV_REGISTERS, DQ_REGISTERS])  # fmt: skip
