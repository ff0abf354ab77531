# mypy: disallow-untyped-defs=False
"""Attention forward: one query tile against all keys it sees, online softmax in base 2 (Dao, FlashAttention-2, alg. 1).

``forward_tile`` is called by the eager kernel below and by the Inductor template; it knows nothing of either.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import LN2, LOG2E, band_mask, clamp_bounds, load_rows, masked_block, store_rows, tanh, visible_range
from .features import (
    BIAS,
    DROPOUT,
    HIDES,
    MAY_BE_BLIND,
    block_range,
    dropout_keep,
    hide,
    load_bias,
    load_own,
    start_row,
)


@triton.jit
def row_factor(row_max, factor):
    """``factor``, or for rows of huge scores the next power of two, whose product with the maximum is exact.

    The fused s * factor - max * factor is off by the rounding of the second product.  From 2**28 on that would be more
    than fp16's range takes, and two scores that differ do so by at least 16: there the softmax is that of the maximum
    alone, ties included, whatever the factor.
    """
    power = tl.cast((tl.cast(factor, tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000, tl.float32, bitcast=True)
    return tl.where(tl.abs(row_max) * factor < 2.0**28, factor, power)


@triton.jit
def _key_loop(
    acc, row_sum, row_max, q, k_ptr, v_ptr, stride_kn, stride_vn, span, start_m, q_len, kv_len, lower, upper,
    unit, cap_scale, feats, batch, head, own,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, FAST_TANH: tl.constexpr, FEATURES: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    offs_m = start_m + tl.arange(0, BLOCK_M)
    # Scores are s * factor in base 2.  With a bias they are natural instead, and subtracted before they are scaled: a
    # bias of finfo.min is finite there, so that a row of nothing else is uniform, as in eager.
    factor = LOG2E if BIAS & FEATURES else unit * LOG2E
    first, end, full_begin, full_end, masked_begin, masked_left, masked_count = span
    blocks = masked_count if MASK else (full_end - full_begin) // BLOCK_N
    for i in tl.range(0, blocks):
        n = masked_block(i, masked_begin, masked_left, full_end, BLOCK_N) if MASK else full_begin + i * BLOCK_N
        n = tl.multiple_of(n, BLOCK_N)
        k = load_rows(k_ptr, stride_kn, n, first, end, BLOCK_N, HEAD_DIM, BLOCK_D, MASK)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFTCAP:
            s = tanh(s * cap_scale, FAST_TANH)
        rows = offs_m[:, None]
        cols = (n + tl.arange(0, BLOCK_N))[None, :]
        if BIAS & FEATURES:
            s = s * unit + load_bias(feats, batch, head, rows, cols, q_len, kv_len, FEATURES)
        if MASK or HIDES & FEATURES:
            keep = cols < kv_len
            if MASK:
                keep = band_mask(rows, cols, kv_len, lower, upper, HAS_LOWER, HAS_UPPER)
            keep = hide(keep, feats, batch, head, rows, cols, q_len, kv_len, own, FEATURES, False)
            s = tl.where(keep, s, float("-inf"))
        # The maximum is kept before the factor, so that scaling and subtraction are one fused multiply-add.
        new_max = tl.maximum(row_max, tl.max(s, 1))
        base = new_max
        if MASK or MAY_BE_BLIND & FEATURES:  # only then can a row have seen nothing yet, and -inf - -inf would be NaN
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        if BIAS & FEATURES:
            p = tl.exp2((s - base[:, None]) * factor)
            alpha = tl.exp2((row_max - base) * factor)
        else:
            steepness = row_factor(new_max, factor)
            p = tl.exp2(s * steepness[:, None] - (base * steepness)[:, None])
            alpha = tl.exp2((row_max - base) * steepness)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if DROPOUT & FEATURES:
            p = tl.where(dropout_keep(feats, batch, head, own, start_m, n, BLOCK_M, BLOCK_N, FEATURES), p, 0.0)
        v = load_rows(v_ptr, stride_vn, n, first, end, BLOCK_N, V_HEAD_DIM, BLOCK_DV, MASK)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit
def forward_tile(
    q_ptr, k_ptr, v_ptr, stride_qm, stride_kn, stride_vn, start_m, q_len, kv_len, lower, upper, sm_scale, softcap,
    feats, batch, head, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, FAST_TANH: tl.constexpr, NEGATIVE_SCALE: tl.constexpr,
    FEATURES: tl.constexpr,
):  # fmt: skip
    """Attention of query rows [start_m, start_m + BLOCK_M) of one head.

    Args:
        q_ptr, k_ptr, v_ptr: first element of this (batch, head): [q_len, HEAD_DIM], [kv_len, HEAD_DIM],
            [kv_len, V_HEAD_DIM], last dims contiguous.  k and v already point at the query head's key/value head.
        stride_qm, stride_kn, stride_vn: row strides in elements.
        start_m, q_len, kv_len: int32.
        lower, upper: the band, query i sees key j iff lower <= j - i <= upper; read only if HAS_LOWER / HAS_UPPER
            (pass 0 otherwise).  Any integers.
        sm_scale, softcap: floats; softcap is read only if SOFTCAP (pass 0.0 otherwise).
        BLOCK_D, BLOCK_DV: powers of two >= max(16, HEAD_DIM or V_HEAD_DIM).
        PRECISION: input_precision of tl.dot ("ieee", "tf32", "tf32x3"); matters for fp32 inputs only.
        FAST_TANH: use the hardware's tanh (CUDA only; error 2**-11, below bf16's rounding).
        NEGATIVE_SCALE: sm_scale < 0, to be known at compile time because negating q costs registers.
        feats, FEATURES: see ``features``; ``batch`` and ``head`` (of the query) are read by them only.

    Returns:
        acc: fp32 [BLOCK_M, BLOCK_DV], the normalised output; 0 for rows that see nothing.
        lse: fp32 [BLOCK_M], natural log; -inf for rows that see nothing.  Rows past q_len are garbage, store neither.

    Keys outside the band or the range of the tile are never read, so nothing in them can leak.  A NaN or inf in a V
    row of a block that some row of the tile sees reaches all rows of the tile (0 * inf); one in K does not.
    """
    q = load_rows(q_ptr, stride_qm, start_m, 0, q_len, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    if SOFTCAP:
        unit = softcap
        cap_scale = sm_scale / softcap
    else:
        # A negative scale would turn the maximum of the raw scores into the minimum: its sign goes to q.  A zero scale
        # would make -inf * 0; the tiny stand-in gives the same uniform softmax.
        if NEGATIVE_SCALE:
            q = -q
        unit = tl.maximum(tl.abs(tl.cast(sm_scale, tl.float32)), 1e-30)
        cap_scale = 0.0
    lower, upper = clamp_bounds(lower, upper, q_len, kv_len)
    last_m = tl.minimum(start_m + BLOCK_M, q_len)
    first_n, end_n = block_range(feats, batch, start_m, kv_len, FEATURES)
    span = visible_range(start_m, last_m, first_n, end_n, lower, upper, HAS_LOWER, HAS_UPPER, BLOCK_N)
    own = load_own(feats, batch, start_m + tl.arange(0, BLOCK_M), q_len, FEATURES, False)
    factor = LOG2E if BIAS & FEATURES else unit * LOG2E
    row_max, row_sum = start_row(feats, head, factor, BLOCK_M, FEATURES)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    acc, row_sum, row_max = _key_loop(
        acc, row_sum, row_max, q, k_ptr, v_ptr, stride_kn, stride_vn, span, start_m, q_len, kv_len, lower, upper,
        unit, cap_scale, feats, batch, head, own, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
        HAS_LOWER, HAS_UPPER, SOFTCAP, PRECISION, FAST_TANH, FEATURES, True,
    )  # fmt: skip
    acc, row_sum, row_max = _key_loop(
        acc, row_sum, row_max, q, k_ptr, v_ptr, stride_kn, stride_vn, span, start_m, q_len, kv_len, lower, upper,
        unit, cap_scale, feats, batch, head, own, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
        HAS_LOWER, HAS_UPPER, SOFTCAP, PRECISION, FAST_TANH, FEATURES, False,
    )  # fmt: skip
    empty = (row_max == float("-inf")) & (row_sum == 0.0)  # where all scores are NaN the sum is, too
    row_sum = tl.where(empty, 1.0, row_sum)
    lse = row_max + tl.log2(row_sum) * LN2 if BIAS & FEATURES else (row_max * factor + tl.log2(row_sum)) * LN2
    lse = tl.where(empty, float("-inf"), lse)
    if DROPOUT & FEATURES:
        acc = acc * feats[3][3]
    return acc / row_sum[:, None], lse


@triton.jit(do_not_specialize=[
    "sqb", "sqh", "skb", "skh", "svb", "svh", "sob", "soh",
    "heads", "group", "q_len", "kv_len", "lower", "upper",
])  # fmt: skip
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    sqb, sqh, sqm: tl.constexpr, skb, skh, skn: tl.constexpr, svb, svh, svn: tl.constexpr, sob, soh, som: tl.constexpr,
    heads, group, q_len, kv_len, lower, upper, sm_scale, softcap, feats,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, FAST_TANH: tl.constexpr, NEGATIVE_SCALE: tl.constexpr,
    FEATURES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Eager launch: grid (batch * heads * query tiles,).  ALIGN divides every batch and head stride,
    which lets loads be wide; row strides are constants because that saves registers."""
    tiles = tl.cdiv(q_len, BLOCK_M)
    pid = tl.program_id(0)
    tile = pid % tiles
    if HAS_UPPER:
        tile = tiles - 1 - tile  # the last query tiles see the most keys: start them first
    head = (pid // tiles) % heads
    batch = tl.cast(pid // tiles // heads, tl.int64)
    kv_head = head // group
    sqb, sqh = sqb // ALIGN * ALIGN, sqh // ALIGN * ALIGN
    skb, skh = skb // ALIGN * ALIGN, skh // ALIGN * ALIGN
    svb, svh = svb // ALIGN * ALIGN, svh // ALIGN * ALIGN
    start_m = tile * BLOCK_M
    acc, lse = forward_tile(
        q_ptr + batch * sqb + tl.cast(head, tl.int64) * sqh, k_ptr + batch * skb + tl.cast(kv_head, tl.int64) * skh,
        v_ptr + batch * svb + tl.cast(kv_head, tl.int64) * svh, sqm, skn, svn, start_m, q_len, kv_len, lower, upper,
        sm_scale, softcap, feats, batch, head, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
        HAS_LOWER, HAS_UPPER, SOFTCAP, PRECISION, FAST_TANH, NEGATIVE_SCALE, FEATURES,
    )  # fmt: skip
    out_ptr += batch * sob + tl.cast(head, tl.int64) * soh
    store_rows(out_ptr, som, start_m, q_len, acc, BLOCK_M, V_HEAD_DIM, BLOCK_DV)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    tl.store(lse_ptr + (batch * heads + head) * q_len + offs_m, lse, mask=offs_m < q_len)
