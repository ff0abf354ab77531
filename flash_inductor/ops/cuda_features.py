"""The optional tensors of the op in the form of the Triton kernels: see :mod:`flash_inductor.kernels.features`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import features
from .extras import Extras

Packed = tuple[tuple[Any, ...] | None, int]  # feats, FEATURES


def dropout_constants(p: float) -> tuple[int, float]:
    """(threshold, 1 / (1 - p)): a pair is kept iff its 32-bit word reaches the threshold.  p = 1 keeps nothing."""
    return min(int(p * 2**32), 2**32 - 1), 0.0 if p >= 1 else 1.0 / (1.0 - p)


def _pairs(x: Tensor) -> tuple[Any, ...]:
    strides = [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    return (x.view(torch.uint8) if x.dtype is torch.bool else x, *strides)


def _varies(entry: tuple[Any, ...] | None) -> tuple[bool, bool] | None:
    return None if entry is None else (entry[3] != 0, entry[4] != 0)


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """[B or 1, n] with contiguous rows, and its batch stride."""
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    return x, 0 if x.shape[0] == 1 else x.stride(0)


def pair_bytes(extras: Extras, dropout_p: float) -> int:
    """Bytes of bias, mask and dropout for each pair of a query and a key: they change threads in shared memory."""
    given = (x for x in (extras.bias, extras.mask) if x is not None)
    return sum(x.element_size() for x in given if x.shape[2] > 1 and x.shape[3] > 1) + (dropout_p > 0)


def pack(extras: Extras, heads: int, dropout_p: float, span: Tensor | None, with_sinks: bool = False) -> Packed:
    """``feats`` and ``FEATURES`` of a launch.

    ``span`` is key_range, or query_range for tiles of keys.  Only the forward needs the sinks: they are in its lse.
    """
    bias = None if extras.bias is None else _pairs(extras.bias)
    mask = None if extras.mask is None else _pairs(extras.mask)
    segments = dropout = sinks = ranges = None
    if extras.query_segments is not None and extras.key_segments is not None:
        segments = (*_rows(extras.query_segments), *_rows(extras.key_segments))
    if dropout_p > 0 and extras.rng_state is not None:
        dropout = (extras.rng_state.contiguous(), heads, *dropout_constants(dropout_p))
    if with_sinks and extras.sinks is not None:
        sinks = extras.sinks.contiguous()
    if span is not None:
        span = span if span.stride(2) == 1 else span.contiguous()
        ranges = (span, 0 if span.shape[0] == 1 else span.stride(0), span.stride(1))
    chosen = features.flags(
        bias=_varies(bias),
        mask=_varies(mask),
        segments=segments is not None,
        dropout=dropout is not None,
        sink=sinks is not None,
        range=ranges is not None,
    )
    return ((bias, mask, segments, dropout, sinks, ranges, None), chosen) if chosen else (None, 0)
