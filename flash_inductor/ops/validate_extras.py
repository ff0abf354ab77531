"""The checks of the optional tensors of the op, and what all checks are written with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .extras import Extras
from .ranges import blocks_in, check_equal, is_static_one

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SEGMENTS = ("query_segments", "key_segments")


def check_extras(extras: Extras, query: Tensor, key: Tensor, dropout_p: float) -> None:
    """Raise TypeError or ValueError unless the optional tensors and the dropout fit these queries and keys."""
    batch, heads, q_len, _ = query.shape
    kv_len = key.shape[2]
    scores = (batch, heads, q_len, kv_len)
    _check(extras, "bias", FLOATS, query, scores, scores)
    _check(extras, "mask", (torch.bool,), query, scores, scores)
    _check(extras, "query_segments", (torch.int32,), query, (batch, q_len), (batch,))
    _check(extras, "key_segments", (torch.int32,), query, (batch, kv_len), (batch,))
    _check(extras, "sinks", FLOATS, query, (heads,), ())
    _check(extras, "rng_state", (torch.int64,), query, (2,), ())
    _check(extras, "key_range", (torch.int32,), query, (batch, blocks_in(q_len), 2), (batch,))
    _check(extras, "query_range", (torch.int32,), query, (batch, blocks_in(kv_len), 2), (batch,))
    for name, other in (_SEGMENTS, _SEGMENTS[::-1]):
        if getattr(extras, name) is not None and getattr(extras, other) is None:
            raise ValueError(f"{other}: expected a tensor, because {name} is given, got None")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: expected a probability of at least 0 and below 1, got {dropout_p}")
    if (dropout_p > 0.0) != (extras.rng_state is not None):
        wanted = "a tensor with seed and offset" if dropout_p else "None, because dropout_p is 0"
        raise ValueError(f"rng_state: expected {wanted}, got {'None' if dropout_p else 'a tensor'}")


def _check(
    extras: Extras,
    name: str,
    dtypes: tuple[torch.dtype, ...],
    query: Tensor,
    shape: tuple[Any, ...],
    broadcast: tuple[Any, ...],
) -> None:
    """Check one of them; its first ``len(broadcast)`` dims may be 1."""
    x: Tensor | None = getattr(extras, name)
    if x is None:
        return
    if x.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name}: expected a dtype of {names}, got {x.dtype}")
    if x.dim() != len(shape):
        raise ValueError(f"{name}: expected {len(shape)} dims {words(shape)}, got shape {words(x.shape)}")
    if x.device != query.device:
        raise ValueError(f"{name}: expected device {query.device}, that of query, got {x.device}")
    for i, (size, full) in enumerate(zip(x.shape, shape, strict=True)):
        may_be_1 = i < len(broadcast)
        if not (may_be_1 and is_static_one(size)):
            expectation = f"shape {words(shape)}" + (", where dims may be 1" if may_be_1 else "")
            check_equal(size, full, name, expectation, words(x.shape))


def words(shape: Any) -> str:
    """A shape as people write it."""
    return str(list(shape))
