# mypy: disallow-untyped-defs=False
"""What runs before and after the backward on Hopper: numbers of query rows, and the conversion of dQ."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["sob", "soh", "som", "sdb", "sdh", "sdm", "slh", "sgh", "heads", "q_len", "q_rows"])
def prepare_kernel(
    out_ptr, do_ptr, lse_ptr, grad_lse_ptr, lse2_ptr, delta_ptr, dq_ptr, turns_ptr,
    sob, soh, som, sdb, sdh, sdm, slh, sgh, heads, q_len, q_rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    GRAD_LSE: tl.constexpr, DETERMINISTIC: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * out) - dLSE, lse in log2 units, zeros in the dQ accumulator and in the turns.

    Grid (cdiv(q_rows, BLOCK_M) * batch * heads,).  out, dO: [batch, heads, q_len, HEAD_DIM] with any strides s*, last
    dim contiguous; lse, grad_lse: fp32, row r of all batches and heads at r * slh (sgh); results: fp32 [batch * heads,
    q_rows], 0 beyond q_len, dq [batch * heads, q_rows, DIM], turns int32 [batch * heads * q_rows / 64].
    BLOCK_D: the power of two that holds HEAD_DIM.  BLOCK_M: 64 or a multiple of it.  ALIGN divides the strides of out
    and dO, so that loads can be wide.
    """
    sob, soh, som = sob // ALIGN * ALIGN, soh // ALIGN * ALIGN, som // ALIGN * ALIGN
    sdb, sdh, sdm = sdb // ALIGN * ALIGN, sdh // ALIGN * ALIGN, sdm // ALIGN * ALIGN
    blocks = tl.cdiv(q_rows, BLOCK_M)
    pid = tl.program_id(0)
    row_head = pid // blocks
    m = pid % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    batch = tl.cast(row_head // heads, tl.int64)
    head = tl.cast(row_head % heads, tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = m < q_len
    ok = inside[:, None] & (d < HEAD_DIM)[None, :]
    rows = tl.cast(m, tl.int64)[:, None]
    out = tl.load(out_ptr + batch * sob + head * soh + rows * som + d[None, :], mask=ok, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + batch * sdb + head * sdh + rows * sdm + d[None, :], mask=ok, other=0.0).to(tl.float32)
    delta = tl.sum(out * do, 1)
    row = tl.cast(row_head, tl.int64)
    lse = tl.load(lse_ptr + row * slh + m, mask=inside, other=0.0)
    if GRAD_LSE:
        delta -= tl.load(grad_lse_ptr + row * sgh + m, mask=inside, other=0.0)
    # A row that sees nothing has -inf: any finite number does, all its pairs are masked.
    lse = tl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634)
    stored = m < q_rows
    tl.store(lse2_ptr + row * q_rows + m, lse, mask=stored)
    tl.store(delta_ptr + row * q_rows + m, delta, mask=stored)
    columns = tl.arange(0, DIM)
    dq = dq_ptr + (row * q_rows + tl.cast(m, tl.int64))[:, None] * DIM + columns[None, :]
    tl.store(dq, tl.zeros([BLOCK_M, DIM], tl.float32), mask=stored[:, None])
    if DETERMINISTIC:
        turn = pid % blocks * (BLOCK_M // 64) + tl.arange(0, BLOCK_M // 64)
        zeros = tl.zeros([BLOCK_M // 64], tl.int32)
        tl.store(turns_ptr + row * (q_rows // 64) + turn, zeros, mask=turn < q_rows // 64)


@triton.jit(do_not_specialize=["sqb", "sqh", "sqm", "heads", "q_len", "q_rows"])
def finish_kernel(
    acc_ptr, dq_ptr, sqb, sqh, sqm, heads, q_len, q_rows, scale,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """dq = scale * accumulator.  Grid (cdiv(q_len, 64) * batch * heads,).

    The accumulator, fp32 [batch * heads, q_rows, DIM], consists of tiles of 64 x 64 (the DIM / 64 tiles of 64 rows side
    by side), each in the order of the registers of a wgmma result: [8, 4, 8, 4, 2, 2] = (8 columns, warp, row, pair of
    columns, 8 rows, column).  ALIGN divides the strides of dq.
    """
    sqb, sqh, sqm = sqb // ALIGN * ALIGN, sqh // ALIGN * ALIGN, sqm // ALIGN * ALIGN
    blocks = tl.cdiv(q_len, 64)
    pid = tl.program_id(0)
    row_head = pid // blocks
    first = pid % blocks * 64
    batch = tl.cast(row_head // heads, tl.int64)
    head = tl.cast(row_head % heads, tl.int64)
    m = first + tl.arange(0, 64)
    acc_ptr += (tl.cast(row_head, tl.int64) * q_rows + first) * DIM
    dq_ptr += batch * sqb + head * sqh
    rows = tl.cast(m, tl.int64)[:, None]
    for part in tl.static_range(DIM // 64):
        x = tl.load(acc_ptr + part * 4096 + tl.arange(0, 4096))
        x = tl.permute(tl.reshape(x, [8, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
        d = part * 64 + tl.arange(0, 64)
        ok = (m < q_len)[:, None] & (d < HEAD_DIM)[None, :]
        x = (tl.reshape(x, [64, 64]) * scale).to(dq_ptr.dtype.element_ty)
        tl.store(dq_ptr + rows * sqm + d[None, :], x, mask=ok)
