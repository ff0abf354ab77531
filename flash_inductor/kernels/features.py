# mypy: disallow-untyped-defs=False
"""Optional features of attention inside a tile: bias, mask, segments, dropout, sinks, and ranges of visible blocks.

Every tile takes them as one tuple ``feats`` and one constant ``FEATURES``, a sum of the flags below.  A feature whose
flag isn't set costs nothing: its entry of the tuple is None and its code isn't compiled.  The entries:

    0 bias      (pointer, stride of batch, head, query, key); a flag each says whether it varies with query and with key
    1 mask      the same; bool or uint8, nonzero = visible
    2 segments  (int32 pointer of the queries, batch stride, int32 pointer of the keys, batch stride)
    3 dropout   (int64 pointer of (seed, offset), number of query heads, threshold, 1 / (1 - p))
    4 sink      pointer of the sinks, one per query head
    5 range     (int32 pointer, batch stride, block stride): what blocks of 128 rows of the tile's own kind may see
    6           always None: Triton 3.6 forgets constants inside entries (a stride of 1) in loops, unless the tuple has
                a None behind them, which makes it work out the tuple's type again
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .blocks import LOG2E

# Written FLAG & FEATURES, not the other way round: in the interpreter FEATURES is an int, which knows no constexpr.
BIAS = tl.constexpr(1)
BIAS_ROWS = tl.constexpr(2)
BIAS_COLS = tl.constexpr(4)
MASK = tl.constexpr(8)
MASK_ROWS = tl.constexpr(16)
MASK_COLS = tl.constexpr(32)
SEGMENTS = tl.constexpr(64)
DROPOUT = tl.constexpr(128)
SINK = tl.constexpr(256)
RANGE = tl.constexpr(512)
HIDES = tl.constexpr(8 + 64)  # pairs inside the band may be hidden
MAY_BE_BLIND = tl.constexpr(1 + 8 + 64)  # a row may see nothing though the band shows it something (bias may be -inf)
RANGE_BLOCK = tl.constexpr(128)
PHILOX_ROUNDS = tl.constexpr(7)


def flags(
    *,
    bias: tuple[bool, bool] | None = None,
    mask: tuple[bool, bool] | None = None,
    segments: bool = False,
    dropout: bool = False,
    sink: bool = False,
    range: bool = False,
) -> int:
    """FEATURES of a launch; ``bias`` and ``mask`` say whether they vary with the query and with the key."""
    chosen: list[tuple[Any, tl.constexpr]] = [
        (bias is not None, BIAS),
        (bias is not None and bias[0], BIAS_ROWS),
        (bias is not None and bias[1], BIAS_COLS),
        (mask is not None, MASK),
        (mask is not None and mask[0], MASK_ROWS),
        (mask is not None and mask[1], MASK_COLS),
        (segments, SEGMENTS),
        (dropout, DROPOUT),
        (sink, SINK),
        (range, RANGE),
    ]
    return sum(flag.value for wanted, flag in chosen if wanted)


@triton.jit
def block_range(feats, batch, own_start, other_len, FEATURES: tl.constexpr):
    """(first, end): the rows from own_start on, all of one block, see nothing of the other sequence outside."""
    first = 0
    end = other_len
    if RANGE & FEATURES:
        ptr = feats[5][0] + batch * feats[5][1] + own_start // RANGE_BLOCK * feats[5][2]
        first = tl.maximum(tl.load(ptr), 0)
        end = tl.minimum(tl.load(ptr + 1), other_len)
    return first, end


@triton.jit
def load_own(feats, batch, offs, length, FEATURES: tl.constexpr, KEYS: tl.constexpr):
    """(segments of the tile's own rows, seed, offset): what a tile reads once.  KEYS: its own rows are keys."""
    segments = 0
    seed = 0
    offset = 0
    if SEGMENTS & FEATURES:
        segments = _load_segments(feats, batch, offs, length, KEYS)
    if DROPOUT & FEATURES:
        seed = tl.load(feats[3][0])
        offset = tl.load(feats[3][0] + 1)
    return segments, seed, offset


@triton.jit
def _load_segments(feats, batch, offs, length, KEYS: tl.constexpr):
    ptr = feats[2][2] + batch * feats[2][3] if KEYS else feats[2][0] + batch * feats[2][1]
    return tl.load(ptr + offs, mask=offs < length, other=0)


@triton.jit
def _load_pairs(entry, batch, head, rows, cols, q_len, kv_len, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Elements of a bias or mask for query ``rows`` and key ``cols``, index tensors that broadcast; 0 past the ends.

    Row and column offsets are 64-bit: a matrix of N * N elements passes 2**31 at N = 46341.
    """
    ptr = entry[0] + batch * entry[1] + tl.cast(head, tl.int64) * entry[2]
    if ROWS and COLS:
        ptrs = ptr + tl.cast(rows, tl.int64) * entry[3] + tl.cast(cols, tl.int64) * entry[4]
        found = tl.load(ptrs, mask=(rows < q_len) & (cols < kv_len), other=0)
    elif ROWS:
        found = tl.load(ptr + tl.cast(rows, tl.int64) * entry[3], mask=rows < q_len, other=0)
    elif COLS:
        found = tl.load(ptr + tl.cast(cols, tl.int64) * entry[4], mask=cols < kv_len, other=0)
    else:
        found = tl.load(ptr)
    return found


@triton.jit
def load_bias(feats, batch, head, rows, cols, q_len, kv_len, FEATURES: tl.constexpr):
    """The bias of these pairs in fp32; 0 without one."""
    bias = 0.0
    if BIAS & FEATURES:
        found = _load_pairs(
            feats[0], batch, head, rows, cols, q_len, kv_len, BIAS_ROWS & FEATURES != 0, BIAS_COLS & FEATURES != 0
        )
        bias = tl.cast(found, tl.float32)
    return bias


@triton.jit
def hide(keep, feats, batch, head, rows, cols, q_len, kv_len, own, FEATURES: tl.constexpr, OWN_KEYS: tl.constexpr):
    """``keep`` without the pairs that mask or segments hide.  OWN_KEYS: the tile's own rows are the keys ``cols``."""
    if MASK & FEATURES:
        found = _load_pairs(
            feats[1], batch, head, rows, cols, q_len, kv_len, MASK_ROWS & FEATURES != 0, MASK_COLS & FEATURES != 0
        )
        keep = keep & (found != 0)
    if SEGMENTS & FEATURES:
        if OWN_KEYS:
            keep = keep & (_load_segments(feats, batch, rows, q_len, False) == own[0][:, None])
        else:
            keep = keep & (own[0][:, None] == _load_segments(feats, batch, cols, kv_len, True))
    return keep


@triton.jit
def dropout_keep(
    feats, batch, head, own, start_m, start_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FEATURES: tl.constexpr
):
    """True [BLOCK_M, BLOCK_N] where dropout keeps the probability of a pair; 0 without dropout.

    Pair (b, h, i, j) is kept iff word j % 4 of Philox-4x32 with 7 rounds (Salmon et al. 2011: they pass BigCrush) with
    counter (j // 4, i, b * heads + h, offset) and key seed reaches the threshold p * 2**32.  One call serves 4 pairs.
    ``start_n`` is a multiple of 4.
    """
    keep = 0
    if DROPOUT & FEATURES:
        zero = tl.zeros([BLOCK_M, BLOCK_N // 4], tl.uint32)
        c0 = zero + tl.cast(start_n // 4 + tl.arange(0, BLOCK_N // 4), tl.uint32)[None, :]
        c1 = zero + tl.cast(start_m + tl.arange(0, BLOCK_M), tl.uint32)[:, None]
        c2 = zero + tl.cast(batch * feats[3][1] + head, tl.uint32)
        c3 = zero + tl.cast(own[2], tl.uint32)
        w0, w1, w2, w3 = tl.philox(own[1], c0, c1, c2, c3, n_rounds=PHILOX_ROUNDS)
        threshold = tl.cast(feats[3][2], tl.uint32)
        # Compared before they are joined: bits, not words, change threads.
        even = tl.join(w0 >= threshold, w2 >= threshold)
        odd = tl.join(w1 >= threshold, w3 >= threshold)
        keep = tl.reshape(tl.join(even, odd), [BLOCK_M, BLOCK_N])
    return keep


@triton.jit
def start_row(feats, head, factor, BLOCK_M: tl.constexpr, FEATURES: tl.constexpr):
    """(maximum, sum) that an online softmax starts from: those of the sink, a key that every row sees without a value.

    The maximum is in units of ``1 / factor`` in base 2.
    """
    if SINK & FEATURES:
        sink = tl.cast(tl.load(feats[4] + head), tl.float32)
        row_max = tl.full([BLOCK_M], 0.0, tl.float32) + sink * (LOG2E / factor)
        row_sum = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
    return row_max, row_sum
