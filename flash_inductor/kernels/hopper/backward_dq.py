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

from .device import accumulator, tma_load, tma_reduce_add
from .turns import await_turn, pass_turn


@gluon.jit
def _load_queries(descs, bufs, q_full, do_full, it, batch, head, row_head, m, BLOCK_M: gl.constexpr,
                  DIM: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    q_desc, do_desc, lse_desc, delta_desc = descs
    q_smem, do_smem, lse_smem, delta_smem = bufs
    stage = it % STAGES
    mbarrier.expect(q_full.index(stage), BLOCK_M * DIM * 2 + BLOCK_M * 4)
    tma_load(q_desc, [batch, head, m, 0], q_full.index(stage), q_smem.index(stage))
    tma_load(lse_desc, [row_head, m], q_full.index(stage), lse_smem.index(stage))
    mbarrier.expect(do_full.index(stage), BLOCK_M * DIM * 2 + BLOCK_M * 4)
    tma_load(do_desc, [batch, head, m, 0], do_full.index(stage), do_smem.index(stage))
    tma_load(delta_desc, [row_head, m], do_full.index(stage), delta_smem.index(stage))


@gluon.jit
def _dq_part(ds0, ds1, k0, k1, zero, part: gl.constexpr):
    dq = warpgroup_mma(ds0, k0.slice(part * 64, 64, dim=1), zero, use_acc=False, is_async=True)
    return warpgroup_mma(ds1, k1.slice(part * 64, 64, dim=1), dq, is_async=True)


@gluon.jit
def dq_program(
    q_descs, k_desc, v_desc, dq_desc, turns, k_smem, v_smem, q_bufs, ds_smem, dq_smem, bars, place, band,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, DS_BUFFERS: gl.constexpr,
    DETERMINISTIC: gl.constexpr, HAS_LOWER: gl.constexpr,
):  # fmt: skip
    """Loads, and dQ in parts of 64 x 64 so that its accumulator needs few registers."""
    kv_full, q_full, do_full, empty, ds_full, ds_empty = bars
    batch, kv_head, block_n, heads, group, q_rows = place
    _kv_len, lower, _upper, m_first, m_step, m_blocks = band
    HALF: gl.constexpr = BLOCK_N // 2
    PARTS: gl.constexpr = DIM // 64
    zero = gl.zeros([64, 64], gl.float32, accumulator(64))
    n = block_n * BLOCK_N
    total = group * m_blocks
    if total > 0:
        mbarrier.expect(kv_full.index(0), 2 * BLOCK_N * DIM * 2)
        for w in gl.static_range(2):
            tma_load(k_desc, [batch, kv_head, n + w * HALF, 0], kv_full.index(0), k_smem.index(w))
        load_g = 0  # head of the group and query block of the next load
        load_i = 0
        for it in range(gl.minimum(STAGES - 1, total)):
            head = kv_head * group + load_g
            _load_queries(q_descs, q_bufs, q_full, do_full, it, batch, head, batch * heads + head,
                          m_first + load_i * m_step, BLOCK_M, DIM, STAGES)  # fmt: skip
            if it == 0:
                for w in gl.static_range(2):
                    tma_load(v_desc, [batch, kv_head, n + w * HALF, 0], kv_full.index(0), v_smem.index(w))
            load_i += 1
            if load_i == m_blocks:
                load_i = 0
                load_g += 1
        g = 0
        i = 0
        mbarrier.wait(kv_full.index(0), 0)
        for it in range(total):
            zero_index = it >> 24  # see backward._main_program
            buf = it % DS_BUFFERS
            phase = (it // DS_BUFFERS) & 1
            m = m_first + i * m_step
            block = ((batch * heads + kv_head * group + g) * q_rows + m) // 64
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
            if DETERMINISTIC and it > 0:  # only now: the last sums had the time of a step to arrive
                last = gl.where(i == 0, block - q_rows // 64 + (m_blocks - 1) * (m_step // 64), block - m_step // 64)
                pass_turn(turns + last, block_n + 1)
            for part in gl.static_range(PARTS):
                if not DETERMINISTIC:
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
            i += 1
            if i == m_blocks:
                i = 0
                g += 1
        if DETERMINISTIC:
            last_head = batch * heads + kv_head * group + group - 1
            pass_turn(turns + (last_head * q_rows + m_first + (m_blocks - 1) * m_step) // 64, block_n + 1)
        tma.store_wait(0)
