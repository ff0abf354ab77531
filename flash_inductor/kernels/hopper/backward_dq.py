# mypy: disallow-untyped-defs=False
"""The third warpgroup of ``backward``: it loads, and adds up dQ."""

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

from .device import accumulator, tma_reduce_add
from .turns import await_turn, count_in, pass_turn


@gluon.jit
def _load_queries(descs, bufs, q_full, do_full, it, batch, head, row_head, m, BLOCK_M: gl.constexpr,
                  DIM: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    q_desc, do_desc, lse_desc, delta_desc = descs
    q_smem, do_smem, lse_smem, delta_smem = bufs
    stage = it % STAGES
    mbarrier.expect(q_full.index(stage), BLOCK_M * DIM * 2 + BLOCK_M * 4)
    tma.async_copy_global_to_shared(q_desc, [batch, head, m, 0], q_full.index(stage), q_smem.index(stage))
    tma.async_copy_global_to_shared(lse_desc, [row_head, m], q_full.index(stage), lse_smem.index(stage))
    mbarrier.expect(do_full.index(stage), BLOCK_M * DIM * 2 + BLOCK_M * 4)
    tma.async_copy_global_to_shared(do_desc, [batch, head, m, 0], do_full.index(stage), do_smem.index(stage))
    tma.async_copy_global_to_shared(delta_desc, [row_head, m], do_full.index(stage), delta_smem.index(stage))


@gluon.jit
def _dq_part(ds0, ds1, k0, k1, zero, part: gl.constexpr):
    dq = warpgroup_mma(ds0, k0.slice(part * 64, 64, dim=1), zero, use_acc=False, is_async=True)
    return warpgroup_mma(ds1, k1.slice(part * 64, 64, dim=1), dq, is_async=True)


@gluon.jit
def _finish(dq_out, block, m, batch, head, q_len, dtype: gl.constexpr, PARTS: gl.constexpr):
    """dq = scale * accumulator for 64 rows; the accumulator's order is that of registers, see dq_program."""
    acc_ptr, dq_ptr, stride_b, stride_h, stride_m, head_dim, scale = dq_out
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    e = gl.arange(0, 512, flat)
    row = m + e // 128 * 16 + e // 2 % 2 * 8 + e // 16 % 8
    column = e // 4 % 4 * 2 + e % 2
    acc = acc_ptr + gl.cast(block, gl.int64) * (PARTS * 4096)
    out = dq_ptr + (gl.cast(batch, gl.int64) * stride_b + gl.cast(head, gl.int64) * stride_h)
    out += gl.cast(row, gl.int64) * stride_m
    for first in gl.static_range(0, PARTS * 8, 4):  # four loads in flight
        x0 = gl.load(acc + (first * 512 + e), cache_modifier=".cg")
        x1 = gl.load(acc + ((first + 1) * 512 + e), cache_modifier=".cg")
        x2 = gl.load(acc + ((first + 2) * 512 + e), cache_modifier=".cg")
        x3 = gl.load(acc + ((first + 3) * 512 + e), cache_modifier=".cg")
        c = first * 8 + column
        gl.store(out + c, (x0 * scale).to(dtype), mask=(row < q_len) & (c < head_dim))
        gl.store(out + c + 8, (x1 * scale).to(dtype), mask=(row < q_len) & (c + 8 < head_dim))
        gl.store(out + c + 16, (x2 * scale).to(dtype), mask=(row < q_len) & (c + 16 < head_dim))
        gl.store(out + c + 24, (x3 * scale).to(dtype), mask=(row < q_len) & (c + 24 < head_dim))


@gluon.jit
def _added(
    turns, dq_out, place, band, row_head, m, dtype: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    PARTS: gl.constexpr, DETERMINISTIC: gl.constexpr, FINISH: gl.constexpr, HAS_LOWER: gl.constexpr,
    HAS_UPPER: gl.constexpr,
):  # fmt: skip
    """After this block's keys were added to dQ of queries m...: tell the others; the last one converts it."""
    batch, _kv_head, block_n, heads, _group, q_rows = place
    kv_len, lower, upper, q_len, _m_first, _m_step, _m_blocks = band
    block = (row_head * q_rows + m) // 64
    if FINISH:
        last = (kv_len - 1) // BLOCK_N
        if HAS_UPPER:
            last = gl.minimum(last, (m + BLOCK_M - 1 + upper) // BLOCK_N)
    if DETERMINISTIC:
        pass_turn(turns + block, block_n + 1)
        if FINISH:
            is_last = block_n == last
    else:
        first = 0
        if HAS_LOWER:
            first = gl.maximum(m + lower, 0) // BLOCK_N
        is_last = count_in(turns + block) == last - first
    if FINISH:  # noqa: SIM102 - a constant, unlike the other
        if is_last:
            _finish(dq_out, block, m, batch, row_head - batch * heads, q_len, dtype, PARTS)


@gluon.jit
def dq_program(
    q_descs, k_desc, v_desc, dq_desc, turns, dq_out, k_smem, v_smem, q_bufs, ds_smem, dq_smem, bars, place, band,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, DS_BUFFERS: gl.constexpr,
    DETERMINISTIC: gl.constexpr, FINISH: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr,
):  # fmt: skip
    """Loads, and dQ in parts of 64 x 64 so that its accumulator needs few registers."""
    kv_full, q_full, do_full, empty, ds_full, ds_empty = bars
    batch, kv_head, block_n, heads, group, q_rows = place
    _kv_len, lower, _upper, _q_len, m_first, m_step, m_blocks = band
    HALF: gl.constexpr = BLOCK_N // 2
    PARTS: gl.constexpr = DIM // 64
    dtype: gl.constexpr = k_desc.dtype
    zero = gl.zeros([64, 64], gl.float32, accumulator(64))
    n = block_n * BLOCK_N
    total = group * m_blocks
    if total > 0:
        mbarrier.expect(kv_full.index(0), 2 * BLOCK_N * DIM * 2)
        for w in gl.static_range(2):
            tma.async_copy_global_to_shared(
                k_desc, [batch, kv_head, n + w * HALF, 0], kv_full.index(0), k_smem.index(w)
            )
        load_g = 0  # head of the group and query block of the next load
        load_i = 0
        for it in range(gl.minimum(STAGES - 1, total)):
            head = kv_head * group + load_g
            _load_queries(q_descs, q_bufs, q_full, do_full, it, batch, head, batch * heads + head,
                          m_first + load_i * m_step, BLOCK_M, DIM, STAGES)  # fmt: skip
            if it == 0:
                for w in gl.static_range(2):
                    tma.async_copy_global_to_shared(
                        v_desc, [batch, kv_head, n + w * HALF, 0], kv_full.index(0), v_smem.index(w)
                    )
            load_i += 1
            if load_i == m_blocks:
                load_i = 0
                load_g += 1
        g = 0
        i = 0
        added_head = 0  # of the step before
        added_m = 0
        mbarrier.wait(kv_full.index(0), 0)
        for it in range(total):
            zero_index = it >> 24  # see backward._main_program
            buf = it % DS_BUFFERS
            phase = (it // DS_BUFFERS) & 1
            m = m_first + i * m_step
            row_head = batch * heads + kv_head * group + g
            block = (row_head * q_rows + m) // 64
            ds0 = ds_smem.index(2 * buf).permute((1, 0))
            ds1 = ds_smem.index(2 * buf + 1).permute((1, 0))
            k0 = k_smem.index(zero_index).reshape([HALF, DIM])
            k1 = k_smem.index(zero_index + 1).reshape([HALF, DIM])
            mbarrier.wait(ds_full.index(2 * buf), phase)
            mbarrier.wait(ds_full.index(2 * buf + 1), phase)
            dq = _dq_part(ds0, ds1, k0, k1, zero, 0)
            # Loads are issued while the first part is in flight: the mains have left stage it - 1 long ago.
            ahead = it + STAGES - 1
            if ahead < total:
                head = kv_head * group + load_g
                mbarrier.wait(empty.index(ahead % STAGES), ((ahead // STAGES) & 1) ^ 1)
                _load_queries(q_descs, q_bufs, q_full, do_full, ahead, batch, head, batch * heads + head,
                              m_first + load_i * m_step, BLOCK_M, DIM, STAGES)  # fmt: skip
                load_i += 1
                if load_i == m_blocks:
                    load_i = 0
                    load_g += 1
            if (DETERMINISTIC or FINISH) and it > 0:  # only now: the last sums had the time of a step to arrive
                _added(turns, dq_out, place, band, added_head, added_m, dtype, BLOCK_M, BLOCK_N, PARTS, DETERMINISTIC,
                       FINISH, HAS_LOWER, HAS_UPPER)  # fmt: skip
            for part in gl.static_range(PARTS):
                if not (DETERMINISTIC or FINISH):
                    tma.store_wait(PARTS - 1)
                dq = warpgroup_mma_wait(0, [dq])
                if part == PARTS - 1:
                    mbarrier.arrive(ds_empty.index(buf), count=1)
                # As the registers lie, 16 contiguous bytes a thread.
                x = dq.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
                dq_smem.index(zero_index + part).store(x.reshape([16, 256]))
                if part < PARTS - 1:
                    dq = _dq_part(ds0, ds1, k0, k1, zero, part + 1)
                fence_async_shared()
                if DETERMINISTIC and part == 0:
                    follows = block_n > 0
                    if HAS_LOWER:
                        follows = follows & (m < n - lower)  # else the predecessor's keys aren't seen from here
                    if follows:
                        await_turn(turns + block, block_n)
                tma_reduce_add(dq_desc, [(block * PARTS + part) * 16, 0], dq_smem.index(zero_index + part))
            added_head = row_head
            added_m = m
            i += 1
            if i == m_blocks:
                i = 0
                g += 1
        if DETERMINISTIC or FINISH:
            _added(turns, dq_out, place, band, added_head, added_m, dtype, BLOCK_M, BLOCK_N, PARTS, DETERMINISTIC,
                   FINISH, HAS_LOWER, HAS_UPPER)  # fmt: skip
        tma.store_wait(0)
