"""``attention``: the user function over the op ``flashbwd::attn``."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from .ops import attn, block_ranges
from .ops.ranges import is_padding

Int = Any  # int | torch.SymInt


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    window_size: Int | tuple[Int | None, Int | None] | None = None,
    diagonal: Literal["top_left", "bottom_right"] | Int = "top_left",
    softcap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    query_segments: Tensor | None = None,
    key_segments: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    window_size: Int | tuple[Int | None, Int | None] | None = None,
    diagonal: Literal["top_left", "bottom_right"] | Int = "top_left",
    softcap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    query_segments: Tensor | None = None,
    key_segments: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    window_size: Int | tuple[Int | None, Int | None] | None = None,
    diagonal: Literal["top_left", "bottom_right"] | Int = "top_left",
    softcap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    query_segments: Tensor | None = None,
    key_segments: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention that never stores the scores, forward or backward, eager or compiled.

        s = scale * query @ key.T;   s = softcap * tanh(s / softcap), if given;   s = s + bias, if given
        query i sees key j  iff  -left <= j - (i + diagonal) <= right, and mask[i, j],
                                 and query_segments[i] == key_segments[j], as far as they are given
        out = dropout(softmax(s where seen, -inf elsewhere)) @ value

    Args:
        query: [batch, heads, length, D], any strides.
        key: [batch, key heads, key length, D]; the number of key heads divides that of query heads (grouped-query
            attention), consecutive query heads share a key head.
        value: [batch, key heads, key length, Dv].
        scale: 1 / sqrt(D) if None.
        is_causal: nothing to the right is seen: right = 0, whatever ``window_size`` says of it.
        window_size: how far a query sees. An int for that many keys to both sides, (left, right) for each side, None
            for unbounded, as a whole or on a side. Distances are inclusive: 0 is the query's own position only.
        diagonal: which key is the own position of query 0. "top_left" is key 0 (what scaled_dot_product_attention
            means by causal), "bottom_right" aligns the last query with the last key (what FlashAttention means), an
            int is that key.
        softcap: bounds the scores smoothly to (-softcap, softcap), as Gemma 2 does.
        bias: added to the scores, each dim 1 or that of [batch, heads, length, key length], any floating dtype; nothing
            is expanded in memory. Differentiable. Where it is -inf the key isn't seen.
        mask: bool, True where the key is seen, shaped like ``bias``. Key padding is [batch, 1, 1, key length].
        query_segments: integers that fit int32, [batch or 1, length]: documents packed into one sequence, or chunks. A
            query sees the keys of its own segment.
        key_segments: [batch or 1, key length]; given if ``query_segments`` is.
        sinks: [heads], a further logit in each row's softmax that has no value (gpt-oss). Differentiable.
        dropout_p: probability with which each probability is dropped; the others are divided by 1 - dropout_p. Applied
            whenever it isn't 0: pass 0 in evaluation.
        rng_state: int64 [2], seed and offset of the dropout, which is a function of them; drawn from torch's default
            generator of the device if None.
        return_lse: also return the log-sum-exp of each row.

    Returns:
        out [batch, heads, length, Dv] in the dtype of query and its memory layout; with ``return_lse`` also lse
        [batch, heads, length], natural logarithm, float32 (float64 for float64 inputs), differentiable too; it is of
        the softmax before dropout. A query that sees no key has out 0, lse -inf (the sink, if there are sinks) and no
        gradient.

        Inputs are all float32, bfloat16 or float16, or float64 on the CPU; under autocast they are cast to its dtype.

    Raises:
        TypeError: a dtype that isn't what is said above, or differs between query, key and value.
        ValueError: a shape, device or option that doesn't fit; the message names it.
        NotImplementedError: a head dim or dtype that the device's kernels don't take, or double backward.
    """
    left, right = window_sides(window_size)
    if is_causal:
        right = None  # is_causal says it
    if query_segments is not None and key_segments is not None:
        query_segments, key_segments = (
            x if x.is_floating_point() else x.to(torch.int32) for x in (query_segments, key_segments)
        )
    if dropout_p > 0 and rng_state is None:
        limits = torch.iinfo(torch.int64)
        rng_state = torch.randint(limits.min, limits.max, (2,), dtype=torch.int64, device=query.device)
    key_range = query_range = None
    if query.dim() == key.dim() == 4 and (query_segments is not None or is_padding(mask)):
        key_range, query_range = block_ranges(mask, query_segments, key_segments, query.shape[2], key.shape[2])
    out_and_lse = attn(
        query,
        key,
        value,
        bias,
        mask,
        query_segments,
        key_segments,
        sinks,
        rng_state,
        key_range,
        query_range,
        scale=scale,
        is_causal=is_causal,
        window_left=left,
        window_right=right,
        diagonal=_diagonal(diagonal, query, key),
        softcap=softcap,
        dropout_p=dropout_p,
    )
    return out_and_lse if return_lse else out_and_lse[0]


def window_sides(window_size: Any) -> tuple[Int | None, Int | None]:
    """How far a query sees to the left and to the right, from the argument ``window_size``."""
    if isinstance(window_size, (tuple, list)):
        sides = tuple(window_size)
        if len(sides) != 2:
            raise ValueError(f"window_size: expected an int, (left, right) or None, got {len(sides)} entries")
    else:
        sides = (window_size, window_size)
    for side in sides:
        if isinstance(side, bool) or not (side is None or isinstance(side, (int, torch.SymInt))):
            raise TypeError(f"window_size: expected an int, (left, right) or None, got {window_size!r}")
        if isinstance(side, int) and side < 0:
            raise ValueError(f"window_size: expected distances of at least 0, or None for unbounded, got {window_size}")
    return sides


def _diagonal(diagonal: Any, query: Tensor, key: Tensor) -> Int:
    if isinstance(diagonal, (int, torch.SymInt)) and not isinstance(diagonal, bool):
        return diagonal
    if diagonal == "top_left":
        return 0
    if diagonal == "bottom_right":
        return key.shape[-2] - query.shape[-2]
    raise ValueError(f"diagonal: expected 'top_left', 'bottom_right' or an int, got {diagonal!r}")
