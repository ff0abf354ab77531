"""The op on the CPU: blocks of query rows against the keys that their band reaches.

Memory grows with N * block, work with the visible pairs, and the heads of a group share their keys as extra rows of
one product, so grouped keys are never repeated.  float64 is computed in float64, everything else in float32.

Inside a block, a masked pair has probability 0, and 0 * inf is NaN: where a non-finite value meets a band, blocks of
one row keep to exactly the keys of that row.

Where ATen's CPU flash attention computes the same thing, it does.  For 16-bit inputs its lse is good to 6e-5 only (its
exp is an approximation), below what those dtypes resolve in out and in the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import support
from ..spec import AttentionSpec, MaskSpec
from .layout import empty_like_layout

BLOCK = 128
SHORT = 512  # a shorter sequence is one block if all its scores fit a tile: few calls matter more than skipped pairs
TILE_ELEMENTS = 1 << 20  # scores held at once; batch and heads are split to stay near it


@dataclass(frozen=True)
class _Problem:
    """Sizes and band of one call; ``rows`` are the queries that see a key."""

    batch: int
    kv_heads: int
    group: int
    q_len: int
    kv_len: int
    mask: MaskSpec
    scale: float
    softcap: float | None
    dtype: torch.dtype
    rows: range

    def slices(self) -> Iterator[tuple[slice, slice, slice]]:
        """Batch, query head and key head slices whose scores fit a tile."""
        block, width = self.block, self.kv_len
        if self.mask.lower is not None and self.mask.upper is not None:
            width = min(width, self.mask.upper - self.mask.lower + block)
        fits = max(1, TILE_ELEMENTS // max(1, self.group * block * width))
        heads = min(self.kv_heads, fits)
        batches = max(1, fits // max(1, heads)) if heads == self.kv_heads else 1
        for b in range(0, self.batch, batches):
            for h in range(0, self.kv_heads, heads):
                stop = min(self.kv_heads, h + heads)
                yield slice(b, b + batches), slice(h * self.group, stop * self.group), slice(h, stop)

    def blocks(self, exact: bool) -> Iterator[tuple[int, int, int, int]]:
        """Row and key ranges (i0, i1, j0, j1) of the blocks that hold a visible pair."""
        block = 1 if exact else self.block
        for i0 in range(self.rows.start, self.rows.stop, block):
            i1 = min(self.rows.stop, i0 + block)
            j0 = 0 if self.mask.lower is None else max(0, i0 + self.mask.lower)
            j1 = self.kv_len if self.mask.upper is None else min(self.kv_len, i1 + self.mask.upper)
            yield i0, i1, j0, j1

    def blind_rows(self) -> list[slice]:
        """The queries that see nothing."""
        return [slice(a, b) for a, b in ((0, self.rows.start), (self.rows.stop, self.q_len)) if a < b]

    @property
    def block(self) -> int:
        scores = self.batch * self.kv_heads * self.group * self.q_len * self.kv_len
        return max(1, self.q_len) if self.q_len <= SHORT and scores <= TILE_ELEMENTS else BLOCK

    def fold(self, x: Tensor) -> Tensor:
        """[b, heads, n, d] -> [b * key heads, group * n, d] in the compute dtype; the heads of a group become rows."""
        b, heads, n, d = x.shape
        return x.to(self.dtype).reshape(b * heads // self.group, self.group * n, d)

    def hide(self, scores: Tensor, i0: int, i1: int, j0: int, j1: int, fill: float) -> None:
        """Overwrite what the band hides, touching only the columns that some row of the block doesn't see."""
        tile = scores.view(scores.shape[0], self.group, i1 - i0, j1 - j0)
        rows = torch.arange(i0, i1).unsqueeze(1)
        if self.mask.upper is not None and (first := max(j0, i0 + self.mask.upper + 1)) < j1:
            hidden = torch.arange(first, j1) > rows + self.mask.upper
            tile[..., first - j0 :].masked_fill_(hidden, fill)
        if self.mask.lower is not None and (last := min(j1, i1 - 1 + self.mask.lower)) > j0:
            hidden = torch.arange(j0, last) < rows + self.mask.lower
            tile[..., : last - j0].masked_fill_(hidden, fill)


def _problem(query: Tensor, key: Tensor, spec: AttentionSpec) -> _Problem:
    batch, q_heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1], key.shape[2]
    mask = support.effective_mask(spec.mask, q_len, kv_len)
    first = 0 if mask.upper is None else max(0, -mask.upper)
    stop = q_len if mask.lower is None else min(q_len, kv_len - mask.lower)
    if kv_len == 0 or (mask.lower is not None and mask.upper is not None and mask.lower > mask.upper):
        stop = first
    return _Problem(
        batch,
        kv_heads,
        q_heads // kv_heads if kv_heads else 1,
        q_len,
        kv_len,
        mask,
        1 / math.sqrt(head_dim) if spec.scale is None else spec.scale,
        spec.softcap,
        torch.float64 if query.dtype is torch.float64 else torch.float32,
        range(min(first, q_len), max(min(first, q_len), stop)),
    )


def _finite(*tensors: Tensor | None) -> bool:
    """Whether all values are finite; a sum that overflows counts as not, which costs time but no exactness."""
    return all(x is None or math.isfinite(x.sum(dtype=torch.promote_types(x.dtype, torch.float32))) for x in tensors)


def _spec(
    scale: float | None, is_causal: bool, window_left: Any, window_right: Any, diagonal: Any, softcap: float | None
) -> AttentionSpec:
    return AttentionSpec(scale, MaskSpec.from_window(is_causal, window_left, window_right, diagonal), softcap)


def _unit_stride(x: Tensor) -> Tensor:
    # ATen's CPU flash attention reads garbage from any other stride, and says nothing.
    return x if x.stride(-1) == 1 else x.contiguous()


def _aten_takes(p: _Problem, query: Tensor, key: Tensor, value: Tensor) -> bool:
    reduced = AttentionSpec(p.scale, p.mask, p.softcap)
    fits = support.aten_cpu_route(reduced, query.shape, key.shape, value.shape)
    return fits and min(query.numel(), key.numel()) > 0


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    is_causal: bool,
    window_left: int | None,
    window_right: int | None,
    diagonal: int,
    softcap: float | None,
    **extras: Any,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; shapes, dtypes and layouts as the fake of ``flashbwd::attn`` says."""
    if extras:
        raise NotImplementedError(f"flashbwd::attn: {', '.join(extras)} on the CPU")
    spec = _spec(scale, is_causal, window_left, window_right, diagonal, softcap)
    p = _problem(query, key, spec)
    out = empty_like_layout(query, (*query.shape[:3], value.shape[3]))
    lse = query.new_empty(query.shape[:3], dtype=p.dtype)
    masked = p.mask != MaskSpec()
    exact = masked and not _finite(key, value)
    if not exact and _aten_takes(p, query, key, value):
        result, row_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _unit_stride(query), _unit_stride(key), _unit_stride(value), 0.0, masked, scale=p.scale
        )
        return (result if result.stride() == out.stride() else out.copy_(result)), lse.copy_(row_lse)
    for rows in p.blind_rows():
        out[:, :, rows].zero_()
        lse[:, :, rows].fill_(-math.inf)
    for bs, hs, ks in p.slices():
        k, v = (x[bs, ks].to(p.dtype).flatten(0, 1) for x in (key, value))
        for i0, i1, j0, j1 in p.blocks(exact):
            scores = torch.bmm(p.fold(query[bs, hs, i0:i1]) * p.scale, k[:, j0:j1].mT)
            if softcap is not None:
                scores.div_(softcap).tanh_().mul_(softcap)
            p.hide(scores, i0, i1, j0, j1, -math.inf)
            top = scores.amax(-1, keepdim=True)
            probs = scores.sub_(top).exp_()
            total = probs.sum(-1, keepdim=True)
            tile = out[bs, hs, i0:i1]
            tile.copy_(torch.bmm(probs, v[:, j0:j1]).div_(total).view(tile.shape))
            lse[bs, hs, i0:i1] = total.log_().add_(top).view(tile.shape[:3])
    return out, lse


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float | None,
    is_causal: bool,
    window_left: int | None,
    window_right: int | None,
    diagonal: int,
    softcap: float | None,
    grad_mask: list[bool],
    **extras: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; one that ``grad_mask`` doesn't ask for is an empty tensor of shape [0]."""
    if extras:
        raise NotImplementedError(f"flashbwd::attn: {', '.join(extras)} on the CPU")
    spec = _spec(scale, is_causal, window_left, window_right, diagonal, softcap)
    p = _problem(query, key, spec)
    grads = [
        empty_like_layout(x, x.shape) if wanted else x.new_empty((0,))
        for x, wanted in zip((query, key, value), grad_mask, strict=False)
    ]
    if not any(grad_mask):
        return grads[0], grads[1], grads[2]
    need_q, need_k, need_v = grad_mask[:3]
    delta = (grad_out.to(p.dtype) * out.to(p.dtype)).sum(-1)
    if grad_lse is not None:
        delta -= grad_lse
    exact = p.mask != MaskSpec() and not _finite(query, key, value, grad_out, delta)
    # ATen's backward is the faster in float32, and several times slower in 16 bits; it knows no grad_lse.
    if (
        all(grad_mask[:3])
        and grad_lse is None
        and not exact
        and query.element_size() >= 4
        and _aten_takes(p, query, key, value)
    ):
        tensors = [_unit_stride(x) for x in (grad_out, query, key, value, out)]
        results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, lse, 0.0, p.mask != MaskSpec(), scale=p.scale
        )
        aten = [x if x.stride() == grad.stride() else grad.copy_(x) for grad, x in zip(grads, results, strict=True)]
        return aten[0], aten[1], aten[2]
    if need_q:
        for rows in p.blind_rows():
            grads[0][:, :, rows].zero_()
    for bs, hs, ks in p.slices():
        k, v = (x[bs, ks].to(p.dtype).flatten(0, 1) for x in (key, value))
        grad_k = torch.zeros_like(k) if need_k else None
        grad_v = torch.zeros_like(v) if need_v else None
        for i0, i1, j0, j1 in p.blocks(exact):
            q = p.fold(query[bs, hs, i0:i1]) * p.scale
            go = p.fold(grad_out[bs, hs, i0:i1])
            kb = k[:, j0:j1]
            scores = torch.bmm(q, kb.mT)
            tanh = None
            if softcap is not None:
                tanh = scores.div_(softcap).tanh_()
                scores = tanh * softcap
            probs = scores.sub_(p.fold(lse[bs, hs, i0:i1, None])).exp_()
            p.hide(probs, i0, i1, j0, j1, 0.0)
            if grad_v is not None:
                grad_v[:, j0:j1].baddbmm_(probs.mT, go)
            if not (need_q or need_k):
                continue
            grad_scores = torch.bmm(go, v[:, j0:j1].mT).sub_(p.fold(delta[bs, hs, i0:i1, None])).mul_(probs)
            if tanh is not None:
                grad_scores.mul_(tanh.square_().neg_().add_(1))
            if need_q:
                tile = grads[0][bs, hs, i0:i1]
                tile.copy_(torch.bmm(grad_scores, kb).mul_(p.scale).view(tile.shape))
            if grad_k is not None:
                grad_k[:, j0:j1].baddbmm_(grad_scores.mT, q)
        for grad, total in ((grads[1], grad_k), (grads[2], grad_v)):
            if total is not None:
                grad[bs, ks].copy_(total.view(grad[bs, ks].shape))
    return grads[0], grads[1], grads[2]
