"""The op on the CPU: blocks of query rows against the keys that they can see.

Memory grows with N * block, work with the visible pairs (whole blocks of keys that a band, a mask or segments hide are
skipped), and the heads of a group share their keys as extra rows of one product, so grouped keys are never repeated.
float64 is computed in float64, everything else in float32.

Inside a block, a hidden pair has probability 0, and 0 * inf is NaN: where a non-finite value meets a hidden pair,
blocks of one row keep to exactly the keys of that row.

Where ATen's CPU flash attention computes the same thing, it does.  For 16-bit inputs its lse is good to 6e-5 only (its
exp is an approximation), below what those dtypes resolve in out and in the gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import support
from ..spec import AttentionSpec, MaskSpec
from .cpu_problem import Part, Problem, Tile, cut, make_problem
from .extras import Extras
from .layout import empty_like_layout

# With fewer keys than a vector register holds, 8 or 16 by the machine, ATen gives a row of NaN scores 0, and no NaN.
_FEW_KEYS = 32
NEGLIGIBLE = -(2.0**20)  # with a bias, a row with a smaller lse gives no gradients: see flash_inductor.reference


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


def _aten_takes(p: Problem, query: Tensor, key: Tensor, value: Tensor) -> bool:
    reduced = AttentionSpec(p.scale, p.band, p.softcap)
    fits = (p.plain or p.padded) and support.aten_cpu_route(reduced, query.shape, key.shape, value.shape)
    return fits and min(query.numel(), key.numel()) > 0


def _aten_options(p: Problem, dtype: torch.dtype) -> dict[str, Any]:
    mask = p.extras.mask
    if mask is not None:  # key padding, as small as it is: [batch, 1, 1, keys]
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -math.inf)
    return {"attn_mask": mask, "scale": p.scale}


def _blind(p: Problem) -> Tensor:
    """Bool, broadcastable to [batch, heads, queries]: which rows see no key, for a padded problem of ATen's."""
    seen = p.extras.mask
    assert seen is not None  # that is what padded means
    seen = seen.squeeze(2)
    if p.band == MaskSpec():
        return ~seen.any(-1, keepdim=True)
    last = torch.arange(p.q_len).clamp_(max=p.kv_len - 1)  # the band is causal: row i sees the keys up to i
    return ~seen.expand(*seen.shape[:2], p.kv_len).cummax(-1).values[..., last]


def _product(a: Tensor, b: Tensor, used: Tensor | None) -> Tensor:
    """``a @ b`` with only the terms where ``used`` [batch, rows of a, columns of a] is True."""
    if used is None:
        return torch.bmm(a, b)
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).masked_fill_(~used.unsqueeze(-1), 0).sum(-2)


def _add_product(total: Tensor, a: Tensor, b: Tensor, used: Tensor | None) -> None:
    if used is None:
        total.baddbmm_(a, b)
    else:
        total.add_(_product(a, b, used))


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
    dropout_p: float = 0.0,
    **extras: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; shapes, dtypes and layouts as the fake of ``flashbwd::attn`` says."""
    spec = _spec(scale, is_causal, window_left, window_right, diagonal, softcap)
    p = make_problem(query, key, spec, dropout_p, Extras(**extras))
    bias, sinks = p.extras.bias, p.extras.sinks
    out = empty_like_layout(query, (*query.shape[:3], value.shape[3]))
    lse = query.new_empty(query.shape[:3], dtype=p.dtype)
    exact = p.hides and not _finite(key, value)
    lost = key.shape[2] < _FEW_KEYS and not _finite(query, key)
    if not exact and not lost and _aten_takes(p, query, key, value):
        result, row_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *map(_unit_stride, (query, key, value)), 0.0, p.band != MaskSpec(), **_aten_options(p, query.dtype)
        )
        lse.copy_(row_lse)
        if p.padded:
            lse.masked_fill_(_blind(p), -math.inf)  # ATen's is 0 there
        return (result if result.stride() == out.stride() else out.copy_(result)), lse
    for part in p.parts():
        k, v = (x[part.batch, part.kv_heads].to(p.dtype).flatten(0, 1) for x in (key, value))
        sink = None if sinks is None else sinks[part.heads].to(p.dtype).view(1, -1, 1, 1)
        for tile in p.tiles(part, exact):
            index = (part.batch, part.heads, slice(tile.i0, tile.i1))
            if tile.empty:
                out[index].zero_()
                lse[index] = -math.inf if sink is None else sink.squeeze(-1)
                continue
            scores = torch.bmm(p.fold(query[index]) * p.scale, k[:, tile.j0 : tile.j1].mT)
            if softcap is not None:
                scores.div_(softcap).tanh_().mul_(softcap)
            if bias is not None:
                p.unfold(scores, part, tile).add_(cut(bias, part, tile))
            p.hide(scores, part, tile, -math.inf)
            top = scores.amax(-1, keepdim=True)
            tops = p.unfold(top, part, tile)
            if sink is not None:
                torch.maximum(tops, sink, out=tops)
            if tile.hidden is not None:  # a row that sees nothing: -inf minus itself would be NaN
                tops.masked_fill_(tile.hidden.all(-1, keepdim=True) & (tops == -math.inf), 0)
            probs = scores.sub_(top).exp_()
            total = probs.sum(-1, keepdim=True)
            if sink is not None:
                p.unfold(total, part, tile).add_(torch.exp(sink - tops))
            if (dropped := p.dropped(part, tile)) is not None:
                p.unfold(probs, part, tile).masked_fill_(dropped, 0)
            sums = _product(probs, v[:, tile.j0 : tile.j1], p.used(part, tile) if exact else None)
            # The total is 0 where nothing is seen, else at least 1, the term of the maximum.
            sums.div_(total.masked_fill(total == 0, 1).mul_(1 - dropout_p))
            out[index].copy_(p.unfold(sums, part, tile))
            lse[index] = p.unfold(total.log_().add_(top), part, tile).squeeze(-1)
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
    dropout_p: float = 0.0,
    **extras: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and bias; one ``grad_mask`` doesn't ask for is an empty tensor of shape [0]."""
    spec = _spec(scale, is_causal, window_left, window_right, diagonal, softcap)
    p = make_problem(query, key, spec, dropout_p, Extras(**extras))
    need_q, need_k, need_v, need_bias = grad_mask[:4]
    grads = [
        empty_like_layout(x, x.shape) if wanted and x is not None else query.new_empty((0,))
        for x, wanted in zip((query, key, value, p.extras.bias), grad_mask, strict=False)
    ]
    if not any(grad_mask[:4]):
        return grads[0], grads[1], grads[2], grads[3]
    delta = (grad_out.to(p.dtype) * out.to(p.dtype)).sum(-1)
    if grad_lse is not None:
        delta -= grad_lse
    exact = p.hides and not _finite(query, key, value, grad_out, delta)
    # ATen's backward is the faster in float32, and several times slower in 16 bits; it knows no grad_lse.
    if (
        all(grad_mask[:3])
        and grad_lse is None
        and not exact
        and query.element_size() >= 4
        and _aten_takes(p, query, key, value)
    ):
        tensors = [_unit_stride(x) for x in (grad_out, query, key, value, out)]
        if p.padded:
            lse = lse.masked_fill(lse == -math.inf, 0)
        results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors,
            lse,
            0.0,
            p.band != MaskSpec(),
            **_aten_options(p, query.dtype),
        )
        aten = [x if x.stride() == grad.stride() else grad.copy_(x) for grad, x in zip(grads, results, strict=False)]
        return aten[0], aten[1], aten[2], grads[3]
    bias_sum = _BiasGradient(grads[3], p) if need_bias else None
    for part in p.parts():
        k, v = (x[part.batch, part.kv_heads].to(p.dtype).flatten(0, 1) for x in (key, value))
        grad_k = torch.zeros_like(k) if need_k else None
        grad_v = torch.zeros_like(v) if need_v else None
        for tile in p.tiles(part, exact):
            index = (part.batch, part.heads, slice(tile.i0, tile.i1))
            columns = slice(tile.j0, tile.j1)
            if tile.empty:
                if need_q:
                    grads[0][index].zero_()
                continue
            q, go = p.fold(query[index]) * p.scale, p.fold(grad_out[index])
            used = p.used(part, tile) if exact else None
            used_by_keys = None if used is None else used.mT
            probs, tanh = _probabilities(p, part, tile, q, k[:, columns], p.fold(lse[index].unsqueeze(-1)))
            dropped = p.dropped(part, tile)
            if grad_v is not None:
                weights = probs if dropped is None else _drop(p, part, tile, probs.clone(), dropped)
                _add_product(grad_v[:, columns], weights.mT, go, used_by_keys)
            if not (need_q or need_k or need_bias):
                continue
            grad_probs = torch.bmm(go, v[:, columns].mT)
            if dropped is not None:
                _drop(p, part, tile, grad_probs, dropped)
            grad_scores = grad_probs.sub_(p.fold(delta[index].unsqueeze(-1))).mul_(probs)
            if exact:
                p.hide(grad_scores, part, tile, 0.0)
            if bias_sum is not None:
                bias_sum.add(part, tile, p.unfold(grad_scores, part, tile))
            if tanh is not None:
                grad_scores.mul_(tanh.square_().neg_().add_(1))
                if exact:
                    p.hide(grad_scores, part, tile, 0.0)
            if need_q:
                result = _product(grad_scores, k[:, columns], used).mul_(p.scale)
                grads[0][index].copy_(p.unfold(result, part, tile))
            if grad_k is not None:
                _add_product(grad_k[:, columns], grad_scores.mT, q, used_by_keys)
        for grad, total in ((grads[1], grad_k), (grads[2], grad_v)):
            if total is not None:
                target = grad[part.batch, part.kv_heads]
                target.copy_(total.view(target.shape))
    if bias_sum is not None:
        bias_sum.finish()
    return grads[0], grads[1], grads[2], grads[3]


def _probabilities(
    p: Problem, part: Part, tile: Tile, q: Tensor, k: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Probabilities before dropout, and the tanh of the softcap if there is one; all folded."""
    scores = torch.bmm(q, k.mT)
    tanh = None
    if p.softcap is not None:
        tanh = scores.div_(p.softcap).tanh_()
        scores = tanh * p.softcap
    if p.extras.bias is not None:
        p.unfold(scores, part, tile).add_(cut(p.extras.bias, part, tile))
        lse = lse.masked_fill((lse < NEGLIGIBLE) & lse.isfinite(), math.inf)
    probs = scores.sub_(lse).exp_()
    p.hide(probs, part, tile, 0.0)
    return probs, tanh


def _drop(p: Problem, part: Part, tile: Tile, x: Tensor, dropped: Tensor) -> Tensor:
    p.unfold(x.div_(1 - p.dropout_p), part, tile).masked_fill_(dropped, 0)
    return x


class _BiasGradient:
    """Sums the gradients of biased scores over the dims that the bias broadcasts."""

    def __init__(self, grad: Tensor, p: Problem) -> None:
        full = (p.batch, p.kv_heads * p.group, p.q_len, p.kv_len)
        self.dims = [dim for dim, size in enumerate(grad.shape) if size == 1 and full[dim] != 1]
        # Without a broadcast dim each element is written once: no second N * Nk tensor to sum in.
        self.grad = grad.zero_()
        self.sum = torch.zeros(grad.shape, dtype=p.dtype) if self.dims else self.grad

    def add(self, part: Part, tile: Tile, grad_scores: Tensor) -> None:
        terms = grad_scores.sum(self.dims, keepdim=True) if self.dims else grad_scores
        cut(self.sum, part, tile).add_(terms)

    def finish(self) -> None:
        if self.sum is not self.grad:
            self.grad.copy_(self.sum)
