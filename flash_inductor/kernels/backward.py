# mypy: disallow-untyped-defs=False
"""Attention backward in two deterministic parts: dQ per query tile, dK and dV per key tile.  No atomics.

With p = exp(s - lse), dp = dO V^T and delta = rowsum(dO * O) - dLSE:  ds = p * (dp - delta) (times 1 - tanh^2 under a
softcap), dQ = scale * ds K, dK = scale * ds^T Q, dV = p^T dO  (Dao, FlashAttention-2, alg. 2).  Dropout of p puts
kept / (1 - rate) before dp and before the p of dV; a sink is in lse already.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import LOG2E, band_mask, clamp_bounds, load_rows, masked_block, store_rows, tanh, visible_range
from .features import BIAS, DROPOUT, HIDES, MAY_BE_BLIND, block_range, dropout_keep, hide, load_bias, load_own

NEGLIGIBLE = tl.constexpr(-(2.0**20) * 1.4426950408889634)  # lse2 of a row that gives no gradients


@triton.jit
def probs_and_grad(
    s, dp, lse2, delta, keep, bias, kept, rescale, factor, cap_scale,
    SOFTCAP: tl.constexpr, SLOPE: tl.constexpr, FAST_TANH: tl.constexpr, FEATURES: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """p as it meets V, but for the factor ``rescale``, and ds from raw scores.

    ``keep`` is read if MASK or FEATURES hides pairs, ``bias`` and ``kept`` (by dropout) if FEATURES has them.  SLOPE:
    ds is the gradient of the raw scores, else of those after the softcap.
    """
    if SOFTCAP:
        s = tanh(s * cap_scale, FAST_TANH)
    z = s * factor - lse2
    if BIAS & FEATURES:
        z += bias * LOG2E
    p = tl.exp2(z)
    if DROPOUT & FEATURES:
        dp = tl.where(kept, dp * rescale, 0.0)
    ds = p * (dp - delta)
    if SOFTCAP and SLOPE:
        ds = ds * (1.0 - s * s)
    if DROPOUT & FEATURES:
        p = tl.where(kept, p, 0.0)
    if MASK or HIDES & FEATURES:  # both: a NaN in a masked K row makes s NaN, one in V makes dp NaN
        p = tl.where(keep, p, 0.0)
        ds = tl.where(keep, ds, 0.0)
    return p, ds


@triton.jit
def factors(sm_scale, softcap, SOFTCAP: tl.constexpr):
    """(factor, cap_scale): base-2 scores are s * factor, or tanh(s * cap_scale) * factor under a softcap."""
    if SOFTCAP:
        factor = softcap * LOG2E
        cap_scale = sm_scale / softcap
    else:
        factor = sm_scale * LOG2E
        cap_scale = 0.0
    return factor, cap_scale


@triton.jit
def load_lse2(lse_ptr, offs, keep):
    """Base-2 lse with +inf for rows that see nothing or don't exist, so that their probabilities come out 0.

    So do those of a row that sees only what a bias such as finfo.min hides: lse has no digits for its probabilities.
    """
    lse2 = tl.load(lse_ptr + offs, mask=keep, other=float("inf")) * LOG2E
    return tl.where(lse2 < NEGLIGIBLE, float("inf"), lse2)


@triton.jit
def _key_loop(
    dq, q, do, lse2, delta, k_ptr, v_ptr, stride_kn, stride_vn, span, start_m, q_len, kv_len, lower, upper,
    factor, cap_scale, feats, batch, head, own,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, FAST_TANH: tl.constexpr, FEATURES: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    first, end, full_begin, full_end, masked_begin, masked_left, masked_count = span
    blocks = masked_count if MASK else (full_end - full_begin) // BLOCK_N
    for i in tl.range(0, blocks):
        n = masked_block(i, masked_begin, masked_left, full_end, BLOCK_N) if MASK else full_begin + i * BLOCK_N
        n = tl.multiple_of(n, BLOCK_N)
        k = load_rows(k_ptr, stride_kn, n, first, end, BLOCK_N, HEAD_DIM, BLOCK_D, MASK)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        v = load_rows(v_ptr, stride_vn, n, first, end, BLOCK_N, V_HEAD_DIM, BLOCK_DV, MASK)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        rows = (start_m + tl.arange(0, BLOCK_M))[:, None]
        cols = (n + tl.arange(0, BLOCK_N))[None, :]
        keep = band_mask(rows, cols, kv_len, lower, upper, HAS_LOWER and MASK, HAS_UPPER and MASK)
        keep = hide(keep, feats, batch, head, rows, cols, q_len, kv_len, own, FEATURES, False)
        bias = load_bias(feats, batch, head, rows, cols, q_len, kv_len, FEATURES)
        kept = dropout_keep(feats, batch, head, own, start_m, n, BLOCK_M, BLOCK_N, FEATURES)
        rescale = feats[3][3] if DROPOUT & FEATURES else 1.0
        _, ds = probs_and_grad(
            s, dp, lse2[:, None], delta[:, None], keep, bias, kept, rescale, factor, cap_scale,
            SOFTCAP, True, FAST_TANH, FEATURES, MASK,
        )  # fmt: skip
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def grad_query_tile(
    do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, stride_dom, stride_qm, stride_kn, stride_vn,
    start_m, q_len, kv_len, lower, upper, sm_scale, softcap, feats, batch, head,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, FAST_TANH: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """dQ of query rows [start_m, start_m + BLOCK_M) of one head.

    do_ptr [q_len, V_HEAD_DIM] (row stride stride_dom), lse_ptr and delta_ptr (fp32 [q_len], contiguous) point at this
    (batch, query head); the rest as in ``forward.forward_tile``.  Returns fp32 [BLOCK_M, BLOCK_D]; rows that see
    nothing are 0, rows past q_len are 0.

    Keys outside the band or the range of the tile are never read.  A NaN or inf in a K row of a block that some row of
    the tile sees reaches all rows of the tile (0 * inf); one in V does not.
    """
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr, stride_qm, start_m, 0, q_len, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    do = load_rows(do_ptr, stride_dom, start_m, 0, q_len, BLOCK_M, V_HEAD_DIM, BLOCK_DV, True)
    lse2 = load_lse2(lse_ptr, offs_m, offs_m < q_len)
    delta = tl.load(delta_ptr + offs_m, mask=offs_m < q_len, other=0.0)
    factor, cap_scale = factors(sm_scale, softcap, SOFTCAP)
    lower, upper = clamp_bounds(lower, upper, q_len, kv_len)
    own = load_own(feats, batch, offs_m, q_len, FEATURES, False)
    first_n, end_n = block_range(feats, batch, start_m, kv_len, FEATURES)
    last_m = tl.minimum(start_m + BLOCK_M, q_len)
    span = visible_range(start_m, last_m, first_n, end_n, lower, upper, HAS_LOWER, HAS_UPPER, BLOCK_N)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq = _key_loop(
        dq, q, do, lse2, delta, k_ptr, v_ptr, stride_kn, stride_vn, span, start_m, q_len, kv_len, lower, upper,
        factor, cap_scale, feats, batch, head, own, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
        HAS_LOWER, HAS_UPPER, SOFTCAP, PRECISION, FAST_TANH, FEATURES, True,
    )  # fmt: skip
    dq = _key_loop(
        dq, q, do, lse2, delta, k_ptr, v_ptr, stride_kn, stride_vn, span, start_m, q_len, kv_len, lower, upper,
        factor, cap_scale, feats, batch, head, own, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
        HAS_LOWER, HAS_UPPER, SOFTCAP, PRECISION, FAST_TANH, FEATURES, False,
    )  # fmt: skip
    return dq * sm_scale


@triton.jit
def _query_loop(
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, stride_qm, stride_dom, span, start_n,
    q_len, kv_len, lower, upper, factor, cap_scale, feats, batch, head, own,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, FAST_TANH: tl.constexpr, FEATURES: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    first, end, full_begin, full_end, masked_begin, masked_left, masked_count = span
    blocks = masked_count if MASK else (full_end - full_begin) // BLOCK_M
    for i in tl.range(0, blocks):
        m = masked_block(i, masked_begin, masked_left, full_end, BLOCK_M) if MASK else full_begin + i * BLOCK_M
        m = tl.multiple_of(m, BLOCK_M)
        offs_m = m + tl.arange(0, BLOCK_M)
        q = load_rows(q_ptr, stride_qm, m, first, end, BLOCK_M, HEAD_DIM, BLOCK_D, MASK)
        # Keys in rows: then p and ds are already the left operands of dV and dK.
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        do = load_rows(do_ptr, stride_dom, m, first, end, BLOCK_M, V_HEAD_DIM, BLOCK_DV, MASK)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        if MASK or MAY_BE_BLIND & FEATURES:
            lse2 = load_lse2(lse_ptr, offs_m, offs_m < q_len)
            delta = tl.load(delta_ptr + offs_m, mask=offs_m < q_len, other=0.0)
        else:
            lse2 = tl.load(lse_ptr + offs_m) * LOG2E
            delta = tl.load(delta_ptr + offs_m)
        rows = offs_m[None, :]
        cols = (start_n + tl.arange(0, BLOCK_N))[:, None]
        keep = band_mask(rows, cols, kv_len, lower, upper, HAS_LOWER and MASK, HAS_UPPER and MASK)
        keep = hide(keep & (rows < q_len), feats, batch, head, rows, cols, q_len, kv_len, own, FEATURES, True)
        bias = load_bias(feats, batch, head, rows, cols, q_len, kv_len, FEATURES)
        kept = dropout_keep(feats, batch, head, own, m, start_n, BLOCK_M, BLOCK_N, FEATURES)
        if DROPOUT & FEATURES:
            kept = tl.trans(kept)
        rescale = feats[3][3] if DROPOUT & FEATURES else 1.0
        p, ds = probs_and_grad(
            s, dp, lse2[None, :], delta[None, :], keep, bias, kept, rescale, factor, cap_scale,
            SOFTCAP, True, FAST_TANH, FEATURES, MASK,
        )  # fmt: skip
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def grad_key_value_tile(
    do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr,
    stride_doh, stride_dom, stride_qh, stride_qm, stride_kn, stride_vn, stride_lseh, stride_deltah,
    start_n, group, q_len, kv_len, lower, upper, sm_scale, softcap, feats, batch, head,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, FAST_TANH: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """dK and dV of key rows [start_n, start_n + BLOCK_N) of one key/value head, summed over its query heads in fp32.

    do_ptr, q_ptr, lse_ptr and delta_ptr point at this batch's first query head of the group, whose ``group`` heads lie
    stride_doh / stride_qh / stride_lseh / stride_deltah elements apart; k_ptr and v_ptr at the key/value head.
    ``head`` is the group's first query head; the range in ``feats`` is that of blocks of keys.
    The rest as in ``forward.forward_tile``.  Returns fp32 [BLOCK_N, BLOCK_D] and [BLOCK_N, BLOCK_DV]; keys that no
    query sees get 0, rows past kv_len are garbage.
    """
    k = load_rows(k_ptr, stride_kn, start_n, 0, kv_len, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    v = load_rows(v_ptr, stride_vn, start_n, 0, kv_len, BLOCK_N, V_HEAD_DIM, BLOCK_DV, True)
    factor, cap_scale = factors(sm_scale, softcap, SOFTCAP)
    lower, upper = clamp_bounds(lower, upper, q_len, kv_len)
    # The same band seen from the keys: -upper <= i - j <= -lower.
    last_n = tl.minimum(start_n + BLOCK_N, kv_len)
    first_m, end_m = block_range(feats, batch, start_n, q_len, FEATURES)
    span = visible_range(start_n, last_n, first_m, end_m, -upper, -lower, HAS_UPPER, HAS_LOWER, BLOCK_M)
    own = load_own(feats, batch, start_n + tl.arange(0, BLOCK_N), kv_len, FEATURES, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for g in range(group):
        dk, dv = _query_loop(
            dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, stride_qm, stride_dom, span, start_n,
            q_len, kv_len, lower, upper, factor, cap_scale, feats, batch, head + g, own,
            HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, HAS_LOWER, HAS_UPPER, SOFTCAP, PRECISION,
            FAST_TANH, FEATURES, True,
        )  # fmt: skip
        dk, dv = _query_loop(
            dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, stride_qm, stride_dom, span, start_n,
            q_len, kv_len, lower, upper, factor, cap_scale, feats, batch, head + g, own,
            HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, HAS_LOWER, HAS_UPPER, SOFTCAP, PRECISION,
            FAST_TANH, FEATURES, False,
        )  # fmt: skip
        do_ptr += stride_doh
        q_ptr += stride_qh
        lse_ptr += stride_lseh
        delta_ptr += stride_deltah
    if DROPOUT & FEATURES:
        dv = dv * feats[3][3]
    return dk * sm_scale, dv


@triton.jit(do_not_specialize=[
    "sdb", "sdh", "sqb", "sqh", "skb", "skh", "svb", "svh", "sgb", "sgh",
    "heads", "group", "q_len", "kv_len", "lower", "upper",
])  # fmt: skip
def grad_query_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dq_ptr,
    sdb, sdh, sdm: tl.constexpr, sqb, sqh, sqm: tl.constexpr, skb, skh, skn: tl.constexpr, svb, svh, svn: tl.constexpr,
    sgb, sgh, sgm: tl.constexpr, heads, group, q_len, kv_len, lower, upper, sm_scale, softcap, feats,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, FAST_TANH: tl.constexpr, FEATURES: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Eager launch: grid (batch * heads * query tiles,).  ALIGN divides every batch and head stride,
    which lets loads be wide; row strides are constants because that saves registers."""
    tiles = tl.cdiv(q_len, BLOCK_M)
    pid = tl.program_id(0)
    tile = pid % tiles
    if HAS_UPPER:
        tile = tiles - 1 - tile  # the last query tiles see the most keys: start them first
    head = tl.cast((pid // tiles) % heads, tl.int64)
    batch = tl.cast(pid // tiles // heads, tl.int64)
    kv_head = head // group
    sdb, sdh = sdb // ALIGN * ALIGN, sdh // ALIGN * ALIGN
    sqb, sqh = sqb // ALIGN * ALIGN, sqh // ALIGN * ALIGN
    skb, skh = skb // ALIGN * ALIGN, skh // ALIGN * ALIGN
    svb, svh = svb // ALIGN * ALIGN, svh // ALIGN * ALIGN
    row = (batch * heads + head) * q_len
    start_m = tile * BLOCK_M
    dq = grad_query_tile(
        do_ptr + batch * sdb + head * sdh, q_ptr + batch * sqb + head * sqh, k_ptr + batch * skb + kv_head * skh,
        v_ptr + batch * svb + kv_head * svh, lse_ptr + row, delta_ptr + row, sdm, sqm, skn, svn,
        start_m, q_len, kv_len, lower, upper, sm_scale, softcap, feats, batch, head,
        HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, HAS_LOWER, HAS_UPPER, SOFTCAP, PRECISION, FAST_TANH,
        FEATURES,
    )  # fmt: skip
    store_rows(dq_ptr + batch * sgb + head * sgh, sgm, start_m, q_len, dq, BLOCK_M, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=[
    "sdb", "sdh", "sqb", "sqh", "skb", "skh", "svb", "svh",
    "sgkb", "sgkh", "sgvb", "sgvh", "heads", "group", "q_len", "kv_len", "lower", "upper",
])  # fmt: skip
def grad_key_value_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    sdb, sdh, sdm: tl.constexpr, sqb, sqh, sqm: tl.constexpr, skb, skh, skn: tl.constexpr, svb, svh, svn: tl.constexpr,
    sgkb, sgkh, sgkn: tl.constexpr, sgvb, sgvh, sgvn: tl.constexpr,
    heads, group, q_len, kv_len, lower, upper, sm_scale, softcap, feats,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, FAST_TANH: tl.constexpr, FEATURES: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Eager launch: grid (batch * kv heads * key tiles,).  ``heads`` counts query heads; the rest as in
    ``grad_query_kernel``.  Early key tiles, which most queries see under a causal mask, come first by themselves."""
    tiles = tl.cdiv(kv_len, BLOCK_N)
    kv_heads = heads // group
    pid = tl.program_id(0)
    tile = pid % tiles
    kv_head = tl.cast((pid // tiles) % kv_heads, tl.int64)
    batch = tl.cast(pid // tiles // kv_heads, tl.int64)
    head = kv_head * group
    sdb, sdh = sdb // ALIGN * ALIGN, sdh // ALIGN * ALIGN
    sqb, sqh = sqb // ALIGN * ALIGN, sqh // ALIGN * ALIGN
    skb, skh = skb // ALIGN * ALIGN, skh // ALIGN * ALIGN
    svb, svh = svb // ALIGN * ALIGN, svh // ALIGN * ALIGN
    row = (batch * heads + head) * q_len
    start_n = tile * BLOCK_N
    dk, dv = grad_key_value_tile(
        do_ptr + batch * sdb + head * sdh, q_ptr + batch * sqb + head * sqh, k_ptr + batch * skb + kv_head * skh,
        v_ptr + batch * svb + kv_head * svh, lse_ptr + row, delta_ptr + row, sdh, sdm, sqh, sqm, skn, svn, q_len, q_len,
        start_n, group, q_len, kv_len, lower, upper, sm_scale, softcap, feats, batch, head,
        HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, HAS_LOWER, HAS_UPPER, SOFTCAP, PRECISION, FAST_TANH,
        FEATURES,
    )  # fmt: skip
    dk_ptr += batch * sgkb + kv_head * sgkh
    dv_ptr += batch * sgvb + kv_head * sgvh
    store_rows(dk_ptr, sgkn, start_n, kv_len, dk, BLOCK_N, HEAD_DIM, BLOCK_D)
    store_rows(dv_ptr, sgvn, start_n, kv_len, dv, BLOCK_N, V_HEAD_DIM, BLOCK_DV)
