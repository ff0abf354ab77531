# mypy: disallow-untyped-defs=False
"""Pieces of ``backward_wide``: its loads, and products over head dims that aren't a power of two.

A head dim is FIRST + SECOND columns of a tile, powers of two, SECOND maybe 0: a sum of that many columns is two
accumulators, here x and y.  What the tile holds beyond them is neither computed nor stored.
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

from .device import accumulator, tma_load, tma_store

BLOCK = gl.constexpr(64)  # keys and queries of a step


@gluon.jit
def load_query(descs, bufs, full, stage, batch, head, row_head, m):
    """Q and what goes with its rows."""
    q_desc, lse_desc, delta_desc = descs
    q_smem, lse_smem, delta_smem = bufs
    COLS: gl.constexpr = q_desc.block_shape[3]
    mbarrier.expect(full.index(stage), BLOCK * COLS * 2 + 2 * BLOCK * 4)
    tma_load(q_desc, [batch, head, m, 0], full.index(stage), q_smem.index(stage))
    tma_load(lse_desc, [row_head, m], full.index(stage), lse_smem.index(stage))
    tma_load(delta_desc, [row_head, m], full.index(stage), delta_smem.index(stage))


@gluon.jit
def load_tile(desc, smem, full, stage, batch, head, row):
    COLS: gl.constexpr = desc.block_shape[3]
    mbarrier.expect(full, BLOCK * COLS * 2)
    tma_load(desc, [batch, head, row, 0], full, smem.index(stage))


@gluon.jit
def next_block(g, i, m_blocks):
    """(head of the group, query block) that comes after (g, i)."""
    i += 1
    if i == m_blocks:
        i = 0
        g += 1
    return g, i


@gluon.jit
def over_columns(a, b, zero, FIRST: gl.constexpr, SECOND: gl.constexpr):
    """Begin a b^T."""
    b_first = b.slice(0, FIRST, dim=1).permute((1, 0))
    x = warpgroup_mma(a.slice(0, FIRST, dim=1), b_first, zero, use_acc=False, is_async=True)
    if SECOND > 0:
        b_second = b.slice(FIRST, SECOND, dim=1).permute((1, 0))
        x = warpgroup_mma(a.slice(FIRST, SECOND, dim=1), b_second, x, is_async=True)
    return x


@gluon.jit
def zeros(COLUMNS: gl.constexpr):
    """An accumulator, of the least possible size where it isn't used."""
    WIDTH: gl.constexpr = COLUMNS if COLUMNS > 0 else 8
    return gl.zeros([BLOCK, WIDTH], gl.float32, accumulator(WIDTH))


@gluon.jit
def add(x, y, a, b, FIRST: gl.constexpr, SECOND: gl.constexpr):
    """Begin to add a b, a being in registers."""
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator(FIRST), 2)
    x = warpgroup_mma(gl.convert_layout(a, operand), b.slice(0, FIRST, dim=1), x, is_async=True)
    if SECOND > 0:
        operand_y: gl.constexpr = gl.DotOperandLayout(0, accumulator(SECOND), 2)
        y = warpgroup_mma(gl.convert_layout(a, operand_y), b.slice(FIRST, SECOND, dim=1), y, is_async=True)
    return x, y


@gluon.jit
def wait_sum(x, y, SECOND: gl.constexpr, LATER: gl.constexpr):
    """Until :func:`add` is done; LATER is the second part of an :func:`over_columns` begun after it."""
    PENDING: gl.constexpr = 1 if LATER == 0 else 2
    if SECOND > 0:
        x, y = warpgroup_mma_wait(PENDING, [x, y])
    else:
        x = warpgroup_mma_wait(PENDING, [x])
    return x, y


@gluon.jit
def store_sum(desc, smem, x, y, batch, head, row, FIRST: gl.constexpr, SECOND: gl.constexpr):
    COLS: gl.constexpr = desc.block_shape[3]
    tile = smem.reshape([BLOCK, COLS])
    tile.slice(0, FIRST, dim=1).store(x.to(desc.dtype))
    if SECOND > 0:
        tile.slice(FIRST, SECOND, dim=1).store(y.to(desc.dtype))
    fence_async_shared()
    tma_store(desc, [batch, head, row, 0], smem)
    tma.store_wait(0)
