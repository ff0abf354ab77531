# mypy: disallow-untyped-defs=False
"""Device helpers shared by the forward and backward tiles: block ranges of a band, tile loads, scores, tanh."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def clamp_bounds(lower, upper, q_len, kv_len):
    """Band bounds as int32.  Clamping to the lengths changes no visible pair and keeps int32 sums from overflowing."""
    lower = tl.minimum(tl.maximum(lower, -q_len), kv_len)
    upper = tl.minimum(tl.maximum(upper, -q_len), kv_len)
    return tl.cast(lower, tl.int32), tl.cast(upper, tl.int32)


@triton.jit
def visible_range(
    own_first, own_end, first, end, lower, upper,
    HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Which positions ``j`` of the other sequence the rows ``i`` in [own_first, own_end) see: lower <= j - i <= upper.

    [first, end) bounds what there is to see: the other sequence, or less of it if more is known.

    Returns ``(first, end, full_begin, full_end, masked_begin, masked_left, masked_count)``.  No row sees anything
    outside [first, end).  Every row sees all of [full_begin, full_end), whose ends lie on block boundaries.  The
    masked_count other blocks of STEP lie masked_left of them left of the full ones, from masked_begin on, and the rest
    right of them: see ``masked_block``.
    """
    full_begin = first
    full_end = end
    if HAS_LOWER:
        full_begin = tl.maximum(own_end - 1 + lower, first)
        first = tl.maximum(own_first + lower, first)
    if HAS_UPPER:
        end = tl.minimum(end, tl.maximum(own_end + upper, 0))
        full_end = tl.minimum(full_end, tl.maximum(own_first + upper + 1, 0))
    block_begin = (first // STEP) * STEP
    full_begin = ((full_begin + STEP - 1) // STEP) * STEP
    full_end = tl.maximum((full_end // STEP) * STEP, full_begin)
    masked_left = tl.maximum(tl.cdiv(tl.minimum(full_begin, end) - block_begin, STEP), 0)
    masked_right = tl.maximum(tl.cdiv(end - full_end, STEP), 0)
    return first, end, full_begin, full_end, block_begin, masked_left, masked_left + masked_right


@triton.jit
def masked_block(index, masked_begin, masked_left, full_end, STEP: tl.constexpr):
    """Where the index-th masked block starts.  One loop over both edges: a second loop body would cost registers."""
    return tl.where(index < masked_left, masked_begin + index * STEP, full_end + (index - masked_left) * STEP)


@triton.jit
def load_rows(
    ptr, stride, row, first, end, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, MASK: tl.constexpr
):
    """Rows [row, row + ROWS) of a matrix with a contiguous last dim, zero outside [first, end) (if MASK) and past DIM.

    Row offsets are 64-bit: a row stride times a row may pass 2**31.
    """
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_DIM)
    ptrs = (ptr + tl.cast(row + rows, tl.int64) * stride)[:, None] + dims[None, :]
    if MASK:
        keep = ((row + rows) >= first)[:, None] & ((row + rows) < end)[:, None]
        if DIM != BLOCK_DIM:
            keep = keep & (dims < DIM)[None, :]
        tile = tl.load(ptrs, mask=keep, other=0.0)
    elif DIM != BLOCK_DIM:
        tile = tl.load(ptrs, mask=(dims < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def store_rows(ptr, stride, row, end, tile, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Store the rows below ``end`` and the columns below DIM of a tile, in the pointer's dtype."""
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_DIM)
    ptrs = (ptr + tl.cast(row + rows, tl.int64) * stride)[:, None] + dims[None, :]
    keep = ((row + rows) < end)[:, None] & (dims < DIM)[None, :]
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=keep)


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """tanh in fp32.  FAST: the hardware's approximation (relative error 2**-11, CUDA only), else good to a few 1e-7.

    Near zero the closed form loses digits by cancellation, which a softcap of 50 would multiply by 50: there the
    Taylor series (its next term is below 1e-8 of the value for abs(x) < 0.25).
    """
    if FAST:
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        z = x * x
        tail = z * (-17.0 / 315.0 + z * (62.0 / 2835.0 - z * (1382.0 / 155925.0)))
        series = x + x * z * (-1.0 / 3.0 + z * (2.0 / 15.0) + z * tail)
        y = tl.where(tl.abs(x) < 0.25, series, 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E))))
    return y


@triton.jit
def band_mask(rows, cols, kv_len, lower, upper, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr):
    """True where query ``rows`` sees key ``cols`` (two index tensors that broadcast against each other)."""
    keep = cols < kv_len
    if HAS_LOWER:
        keep = keep & (cols - rows >= lower)
    if HAS_UPPER:
        keep = keep & (cols - rows <= upper)
    return keep
