"""``flashbwd::block_ranges``: which keys a block of queries can see at all, and which queries a block of keys.

Plain torch operations, decomposed before Inductor sees them, so that a compiled graph computes them in a kernel or two,
once for all layers that share a mask.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

RANGE_BLOCK = 128  # rows per entry of key_range and query_range
Int = Any  # int | torch.SymInt


def blocks_in(length: Int) -> Int:
    """How many blocks cover ``length`` rows."""
    return (length + RANGE_BLOCK - 1) // RANGE_BLOCK


def is_padding(mask: Tensor | None) -> bool:
    """Whether a mask hides the same keys from every head and query of a batch entry: [B, 1, 1, Nk]."""
    return mask is not None and mask.dim() == 4 and all(is_static_one(n) for n in mask.shape[1:3])


def is_static_one(size: Int) -> bool:
    """Whether a size is 1, without asking a symbol: it is none of 0 and 1 unless somebody guarded on it."""
    return isinstance(size, int) and size == 1


def block_ranges(
    mask: Tensor | None, query_segments: Tensor | None, key_segments: Tensor | None, q_len: Int, kv_len: Int
) -> tuple[Tensor, Tensor]:
    """int32 key_range [B or 1, ceil(q_len / 128), 2] and query_range [B or 1, ceil(kv_len / 128), 2].

    No query of block t sees a key outside [key_range[b, t, 0], key_range[b, t, 1]); the same from the keys.  Of masks
    only those of shape [B or 1, 1, 1, kv_len] count, others give full ranges; of segments the smallest and largest of
    each block.  Stride 0 where nothing varies.
    """
    given = next((x for x in (mask, query_segments, key_segments) if x is not None), None)
    if given is None:
        raise ValueError("block_ranges: expected a mask or segments, got neither")
    _check("mask", mask, torch.bool, 4, None if mask is None or is_static_one(mask.shape[-1]) else kv_len)
    _check("query_segments", query_segments, torch.int32, 2, q_len)
    _check("key_segments", key_segments, torch.int32, 2, kv_len)
    device = given.device
    of_queries, of_keys = _full(kv_len, device), _full(q_len, device)
    if query_segments is not None and key_segments is not None:
        low_q, high_q = _extremes(query_segments, q_len)
        low_k, high_k = _extremes(key_segments, kv_len)
        meet = (low_q.unsqueeze(2) <= high_k.unsqueeze(1)) & (low_k.unsqueeze(1) <= high_q.unsqueeze(2))
        of_queries = _intersect(of_queries, _span(meet, RANGE_BLOCK, kv_len))
        of_keys = _intersect(of_keys, _span(meet.mT, RANGE_BLOCK, q_len))
    if mask is not None and is_padding(mask):
        visible = mask[:, 0, 0].expand(-1, kv_len)
        of_queries = _intersect(of_queries, _span(visible, 1, kv_len).unsqueeze(1))
        count = blocks_in(kv_len)
        blocks = F.pad(visible, (0, count * RANGE_BLOCK - kv_len)).unflatten(1, (count, RANGE_BLOCK))
        of_keys = of_keys * blocks.any(-1, keepdim=True)
    return of_queries.expand(-1, blocks_in(q_len), -1), of_keys.expand(-1, blocks_in(kv_len), -1)


def _check(name: str, x: Tensor | None, dtype: torch.dtype, dims: int, length: Int | None) -> None:
    if x is None:
        return
    if x.dtype is not dtype:
        raise TypeError(f"{name}: expected {dtype}, got {x.dtype}")
    if x.dim() != dims:
        raise ValueError(f"{name}: expected {dims} dims, got shape {list(x.shape)}")
    if length is not None:
        check_equal(x.shape[-1], length, name, f"a last dim of {length}", list(x.shape))


def check_equal(size: Any, expected: Any, name: str, expectation: str, got: Any) -> None:
    """Raise ValueError unless the sizes are equal."""
    # For symbols this records that the two are the same one, instead of comparing two numbers.
    torch._check_value(size == expected, lambda: f"{name}: expected {expectation}, got {got}")


def _full(length: Int, device: torch.device) -> Tensor:
    """[1, 1, 2]: everything."""
    ends = [torch.full((1, 1), end, dtype=torch.int32, device=device) for end in (0, length)]
    return torch.stack(ends, -1)


def _intersect(a: Tensor, b: Tensor) -> Tensor:
    start = torch.maximum(a[..., 0], b[..., 0])
    stop = torch.minimum(a[..., 1], b[..., 1])
    return torch.stack([torch.minimum(start, stop), stop], -1)


def _extremes(segments: Tensor, length: Int) -> tuple[Tensor, Tensor]:
    """Smallest and largest segment of each block."""
    count = blocks_in(length)
    info = torch.iinfo(torch.int32)
    low, high = (
        F.pad(segments, (0, count * RANGE_BLOCK - length), value=value).unflatten(1, (count, RANGE_BLOCK))
        for value in (info.max, info.min)
    )
    return low.amin(-1), high.amax(-1)


def _span(seen: Tensor, step: int, length: Int) -> Tensor:
    """[..., n] bool -> [..., 2] int32: where the True of the last dim begin and end, in units of ``step`` rows."""
    if isinstance(seen.shape[-1], int) and seen.shape[-1] == 0:
        return torch.zeros((*seen.shape[:-1], 2), dtype=torch.int32, device=seen.device)
    index = torch.arange(seen.shape[-1], dtype=torch.int32, device=seen.device) * step
    stop = torch.where(seen, index + step, 0).amax(-1).clamp(max=length)
    start = torch.where(seen, index, length).amin(-1)
    return torch.stack([torch.minimum(start, stop), stop], -1).to(torch.int32)
