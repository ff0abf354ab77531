"""The stride contract of the op's outputs: one function for the fakes, the CPU and CUDA kernels and the lowering.

The lowering reads it through ``node.meta["val"]`` of the fakes, so fake and real strides can't disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def memory_order(strides: Sequence[int | torch.SymInt], sizes: Sequence[int | torch.SymInt]) -> list[int]:
    """The dims of a tensor from outermost to innermost in memory, as ``torch.empty_like`` orders them.

    A stride of 0 (an expanded dim) and the stride of a dim of size 1 say nothing about the order, so such a dim keeps
    its place among the others.
    """
    silent = [stride == 0 or size == 1 for stride, size in zip(strides, sizes, strict=True)]
    inner_first = list(range(len(strides)))[::-1]
    for i in range(1, len(inner_first)):
        current = i
        for other in range(i - 1, -1, -1):
            a, b = inner_first[other], inner_first[current]
            if silent[a] or silent[b]:
                continue
            if strides[a] > strides[b] or (strides[a] == strides[b] and sizes[a] > sizes[b]):
                inner_first[other], inner_first[current] = b, a
                current = other
            elif strides[a] < strides[b]:
                break
    return inner_first[::-1]


def empty_like_layout(x: Tensor, size: Sequence[int | torch.SymInt], dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised dense tensor of ``size`` with the stride order of ``x`` and a contiguous last dim.

    The same memory as ``torch.empty_like`` (what SDPA's output is), but not that function: its fake and its real
    version give a dim of size 1 different strides.  If the last dim of ``x`` is strided, plainly contiguous: the
    kernels store whole rows.  ``size`` has as many dims as ``x``; ``dtype`` None means that of ``x``.
    """
    strides, sizes = x.stride(), x.shape
    # The real thing, for which a lookup is ten times as fast; symbols can't be looked up.
    if all(map(_is_number, (*strides, *sizes, *size))):
        wanted = dense_strides(strides, sizes, tuple(size))
        return torch.empty_strided(size, wanted, dtype=dtype or x.dtype, device=x.device)
    if strides[-1] != 1 and sizes[-1] != 1:
        return torch.empty(size, dtype=dtype or x.dtype, device=x.device)
    order = memory_order(strides, sizes)
    position = [order.index(dim) for dim in range(x.dim())]
    return torch.empty([size[dim] for dim in order], dtype=dtype or x.dtype, device=x.device).permute(position)


def _is_number(x: object) -> bool:
    return type(x) is int


@lru_cache(maxsize=4096)
def dense_strides(strides: Sequence[int], sizes: Sequence[int], size: Sequence[int]) -> tuple[int, ...]:
    """The strides that :func:`empty_like_layout` gives a tensor of ``size``, from those and the sizes of ``x``."""
    rank = len(sizes)
    plain = strides[-1] != 1 and sizes[-1] != 1
    found, step = [0] * rank, 1
    for dim in reversed(range(rank) if plain else memory_order(strides, sizes)):
        found[dim] = step
        step *= max(1, size[dim])
    return tuple(found)


def has_wide_rows(x: Tensor) -> bool:
    """Whether the strides let TMA, or loads of 16 bytes, read all rows; so that only the pointer is left to check."""
    step = 16 // x.element_size()
    *strides, last = x.stride()
    return last == 1 and all(
        size <= 1 or (stride % step == 0 and stride != 0) for size, stride in zip(x.shape, strides, strict=False)
    )
