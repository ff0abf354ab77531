# mypy: disallow-untyped-defs=False
"""Gradient of the bias: one tile of dz = p * (dp - delta), summed in fp32 over what the bias is broadcast over.

Deterministic and without atomics.  Batches and heads that share a bias are summed by the program.  Of a bias that all
queries (or keys) share, a program sums CHUNK of them: the rest of the sum, over ceil(N / CHUNK) numbers, is its
caller's, so that a program's work has a bound.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .backward import factors, load_lse2, probs_and_grad
from .blocks import band_mask, clamp_bounds, load_rows
from .features import DROPOUT, dropout_keep, hide, load_bias, load_own

CHUNK = 128  # a multiple of every tile's rows and keys


@triton.jit
def bias_blocks(length, STEP: tl.constexpr, SUMMED: tl.constexpr, CHUNK: tl.constexpr):
    """How many programs share ``length`` rows (keys): one per tile, or per CHUNK if they are summed."""
    return tl.cdiv(length, CHUNK if SUMMED else STEP)


@triton.jit
def grad_bias_tile(
    do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, do_strides, q_strides, k_strides, v_strides,
    block_m, block_n, batch, batches, head, summed_heads, heads, group, q_len, kv_len, lower, upper, sm_scale, softcap,
    feats, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, FAST_TANH: tl.constexpr, FEATURES: tl.constexpr,
    SUM_ROWS: tl.constexpr, SUM_COLS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of the bias, and where it goes.

    Args:
        do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr: the whole tensors; the last two contiguous [B, heads, q_len].
        do_strides, ...: (batch, head, row) strides, last dims contiguous.
        block_m, block_n: which tile, or CHUNK of rows (keys) if SUM_ROWS (SUM_COLS).
        batch, batches, head, summed_heads: first of the batches and query heads to sum, and how many.
        heads, group: query heads, and how many of them share a key head.  The rest as in ``forward.forward_tile``.

    Returns:
        fp32 [BLOCK_M, BLOCK_N], rows [BLOCK_M, 1], columns [1, BLOCK_N] and which elements to store there.  Rows
        (columns) that are summed all hold the sum, which is stored once, at row block_m (column block_n).
    """
    ROW_STEPS: tl.constexpr = CHUNK // BLOCK_M if SUM_ROWS else 1
    COL_STEPS: tl.constexpr = CHUNK // BLOCK_N if SUM_COLS else 1
    start_m = block_m * (BLOCK_M * ROW_STEPS)
    start_n = block_n * (BLOCK_N * COL_STEPS)
    factor, cap_scale = factors(sm_scale, softcap, SOFTCAP)
    lower, upper = clamp_bounds(lower, upper, q_len, kv_len)
    steps = batches * summed_heads * (ROW_STEPS * COL_STEPS)
    if HAS_LOWER:  # the last key is left of the first row's band
        steps = tl.where(start_n + BLOCK_N * COL_STEPS - 1 - start_m < lower, 0, steps)
    if HAS_UPPER:  # the first key is right of the last row's band
        steps = tl.where(start_n - (start_m + BLOCK_M * ROW_STEPS - 1) > upper, 0, steps)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.range(0, steps):
        n = start_n + i % COL_STEPS * BLOCK_N
        m = start_m + i // COL_STEPS % ROW_STEPS * BLOCK_M
        outer = i // (COL_STEPS * ROW_STEPS)
        h = tl.cast(head + outer % summed_heads, tl.int64)
        b = tl.cast(batch + outer // summed_heads, tl.int64)
        row = (b * heads + h) * q_len
        kv_h = h // group
        q = load_rows(
            q_ptr + b * q_strides[0] + h * q_strides[1], q_strides[2], m, 0, q_len, BLOCK_M, HEAD_DIM, BLOCK_D, True
        )
        k = load_rows(
            k_ptr + b * k_strides[0] + kv_h * k_strides[1], k_strides[2], n, 0, kv_len, BLOCK_N, HEAD_DIM, BLOCK_D, True
        )
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        do = load_rows(
            do_ptr + b * do_strides[0] + h * do_strides[1], do_strides[2], m, 0, q_len, BLOCK_M, V_HEAD_DIM, BLOCK_DV,
            True,
        )  # fmt: skip
        v = load_rows(
            v_ptr + b * v_strides[0] + kv_h * v_strides[1], v_strides[2], n, 0, kv_len, BLOCK_N, V_HEAD_DIM, BLOCK_DV,
            True,
        )  # fmt: skip
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        offs_m = m + tl.arange(0, BLOCK_M)
        lse2 = load_lse2(lse_ptr + row, offs_m, offs_m < q_len)
        delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < q_len, other=0.0)
        rows = offs_m[:, None]
        cols = (n + tl.arange(0, BLOCK_N))[None, :]
        own = load_own(feats, b, offs_m, q_len, FEATURES, False)
        keep = band_mask(rows, cols, kv_len, lower, upper, HAS_LOWER, HAS_UPPER) & (rows < q_len)
        keep = hide(keep, feats, b, h, rows, cols, q_len, kv_len, own, FEATURES, False)
        bias = load_bias(feats, b, h, rows, cols, q_len, kv_len, FEATURES)
        kept = dropout_keep(feats, b, h, own, m, n, BLOCK_M, BLOCK_N, FEATURES)
        rescale = feats[3][3] if DROPOUT & FEATURES else 1.0
        _, dz = probs_and_grad(
            s, dp, lse2[:, None], delta[:, None], keep, bias, kept, rescale, factor, cap_scale,
            SOFTCAP, False, FAST_TANH, FEATURES, True,
        )  # fmt: skip
        acc += dz
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    if SUM_ROWS:
        acc = tl.broadcast_to(tl.sum(acc, 0)[None, :], [BLOCK_M, BLOCK_N])
        keep_rows = rows == 0
        rows = rows + block_m
    else:
        rows = rows + start_m
        keep_rows = rows < q_len
    if SUM_COLS:
        acc = tl.broadcast_to(tl.sum(acc, 1)[:, None], [BLOCK_M, BLOCK_N])
        keep_cols = cols == 0
        cols = cols + block_n
    else:
        cols = cols + start_n
        keep_cols = cols < kv_len
    return acc, rows, cols, keep_rows & keep_cols


@triton.jit(do_not_specialize=[
    "sdb", "sdh", "sqb", "sqh", "skb", "skh", "svb", "svh", "sgb", "sgh", "sgm",
    "batches", "summed_heads", "bias_heads", "heads", "group", "q_len", "kv_len", "lower", "upper",
])  # fmt: skip
def grad_bias_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, out_ptr,
    sdb, sdh, sdm: tl.constexpr, sqb, sqh, sqm: tl.constexpr, skb, skh, skn: tl.constexpr, svb, svh, svn: tl.constexpr,
    sgb, sgh, sgm, sgn, batches, summed_heads, bias_heads, heads, group, q_len, kv_len, lower, upper, sm_scale, softcap,
    feats, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, FAST_TANH: tl.constexpr, FEATURES: tl.constexpr,
    SUM_ROWS: tl.constexpr, SUM_COLS: tl.constexpr, CHUNK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Eager launch: grid (bias batches * bias heads * row blocks * column blocks,).  out [bias batches, bias heads,
    rows or ceil(rows / CHUNK), keys or ceil(keys / CHUNK)]; a program sums ``batches`` batches and ``summed_heads``
    heads.  ALIGN as in ``backward.grad_query_kernel``."""
    blocks_m = bias_blocks(q_len, BLOCK_M, SUM_ROWS, CHUNK)
    blocks_n = bias_blocks(kv_len, BLOCK_N, SUM_COLS, CHUNK)
    pid = tl.program_id(0)
    block_n = pid % blocks_n
    block_m = pid // blocks_n % blocks_m
    out_head = pid // blocks_n // blocks_m % bias_heads
    out_batch = pid // blocks_n // blocks_m // bias_heads
    sdb, sdh = sdb // ALIGN * ALIGN, sdh // ALIGN * ALIGN
    sqb, sqh = sqb // ALIGN * ALIGN, sqh // ALIGN * ALIGN
    skb, skh = skb // ALIGN * ALIGN, skh // ALIGN * ALIGN
    svb, svh = svb // ALIGN * ALIGN, svh // ALIGN * ALIGN
    acc, rows, cols, keep = grad_bias_tile(
        do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, (sdb, sdh, sdm), (sqb, sqh, sqm), (skb, skh, skn),
        (svb, svh, svn), block_m, block_n, out_batch * batches, batches, out_head * summed_heads, summed_heads,
        heads, group, q_len, kv_len, lower, upper, sm_scale, softcap, feats, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV,
        BLOCK_M, BLOCK_N, HAS_LOWER, HAS_UPPER, SOFTCAP, PRECISION, FAST_TANH, FEATURES, SUM_ROWS, SUM_COLS,
        CHUNK,
    )  # fmt: skip
    out_ptr += tl.cast(out_batch, tl.int64) * sgb + tl.cast(out_head, tl.int64) * sgh
    ptrs = out_ptr + tl.cast(rows, tl.int64) * sgm + tl.cast(cols, tl.int64) * sgn
    tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=keep)
