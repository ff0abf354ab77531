"""The formulas of the package docstring, term by term."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..spec import AttentionSpec, MaskSpec
from .dropout import kept

# A row whose lse is below this has a bias that stands for -inf, finfo.min say, at everything it sees.  Its output is
# that of the formula, a mean, but it gives no gradients: they are computed from lse, which can't tell its scores apart.
NEGLIGIBLE = -(2.0**20)


@dataclass(frozen=True)
class Extras:
    """What a call has besides query, key, value and the band; shapes as in the package docstring."""

    bias: Tensor | None = None
    mask: Tensor | None = None
    query_segments: Tensor | None = None
    key_segments: Tensor | None = None
    sinks: Tensor | None = None
    rng_state: Tensor | None = None
    dropout_p: float = 0.0

    def visible(self, band: MaskSpec, q_len: int, kv_len: int, device: torch.device | str = "cpu") -> Tensor:
        """Bool [1 or B, 1 or Hq, q_len, kv_len]: which query sees which key."""
        seen = visible(band, q_len, kv_len, device)[None, None]
        if self.mask is not None:
            seen = seen & self.mask
        if self.query_segments is not None and self.key_segments is not None:
            seen = seen & (self.query_segments[:, None, :, None] == self.key_segments[:, None, None, :])
        if self.bias is not None:
            seen = seen & (self.bias != -math.inf)
        return seen

    def keep_factor(self, shape: torch.Size) -> Tensor | float:
        """What dropout multiplies the probabilities [B, Hq, Nq, Nk] with: 0 or 1 / (1 - p)."""
        if self.rng_state is None:
            return 1.0
        batch, heads, q_len, kv_len = shape
        return kept(batch, heads, q_len, kv_len, self.dropout_p, self.rng_state).double() / (1 - self.dropout_p)


def visible(mask: MaskSpec, q_len: int, kv_len: int, device: torch.device | str = "cpu") -> Tensor:
    """Bool [q_len, kv_len]: True where the band lets the query (row) see the key (column)."""
    distance = torch.arange(kv_len, device=device) - torch.arange(q_len, device=device).unsqueeze(1)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if mask.lower is not None:
        seen &= distance >= mask.lower
    if mask.upper is not None:
        seen &= distance <= mask.upper
    return seen


def _product(a: Tensor, b: Tensor, used: Tensor) -> Tensor:
    """``a @ b`` with only the terms where ``used`` [rows of a, columns of a] is True.

    ``a`` is 0 where it isn't used, so this differs from ``a @ b`` only if ``b`` holds inf or NaN.
    """
    if torch.isfinite(b).all():
        return a @ b
    terms = a.unsqueeze(-1) * b.unsqueeze(-3)  # [..., rows, terms, width]
    return terms.masked_fill(~used.unsqueeze(-1), 0).sum(-2)


def _probabilities(
    query: Tensor, key: Tensor, spec: AttentionSpec, extras: Extras
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p before dropout, lse, dz/ds and what is visible, for float64 inputs with equal numbers of heads."""
    scale = 1 / math.sqrt(query.shape[-1]) if spec.scale is None else spec.scale
    seen = extras.visible(spec.mask, query.shape[2], key.shape[2], query.device)
    z = scale * (query @ key.mT)
    slope = torch.ones_like(z)
    if spec.softcap is not None:
        tanh = torch.tanh(z / spec.softcap)
        z, slope = spec.softcap * tanh, 1 - tanh**2
    if extras.bias is not None:
        z = z + extras.bias.double()
    z = z.masked_fill(~seen, -math.inf)
    with_sink = z
    if extras.sinks is not None:
        column = extras.sinks.double().view(1, -1, 1, 1).expand(*z.shape[:3], 1)
        with_sink = torch.cat([z, column], -1)
    # Not exp(z - lse): of scores such as finfo.min, lse has no digits for the logarithm of their number.
    p = torch.softmax(with_sink, -1)[..., : z.shape[-1]].masked_fill(~seen, 0)
    return p, torch.logsumexp(with_sink, -1), slope, seen


def _expand(x: Tensor, heads: int) -> Tensor:
    return x.double().repeat_interleave(heads // x.shape[1], dim=1)


def _sum_to(x: Tensor, shape: torch.Size) -> Tensor:
    """Sum over the dims that a tensor of ``shape`` broadcasts."""
    dims = [dim for dim, size in enumerate(shape) if size == 1 and x.shape[dim] != 1]
    return x.sum(dims, keepdim=True) if dims else x


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec | None = None, **extras: Any
) -> tuple[Tensor, Tensor]:
    """Output [B, Hq, Nq, Dv] and log-sum-exp [B, Hq, Nq], both float64, of any float inputs.

    ``extras`` are bias, mask, query_segments, key_segments, sinks, rng_state and dropout_p.
    """
    heads, more = query.shape[1], Extras(**extras)
    p, lse, _, seen = _probabilities(query.double(), _expand(key, heads), spec or AttentionSpec(), more)
    return _product(p * more.keep_factor(p.shape), _expand(value, heads), seen), lse


def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec | None = None,
    **extras: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of query, key, value, bias and sinks (None without them), float64.

    Probabilities and output are recomputed from the inputs.
    """
    spec, more = spec or AttentionSpec(), Extras(**extras)
    (batch, heads, _, head_dim), kv_heads, kv_len = query.shape, key.shape[1], key.shape[2]
    scale = 1 / math.sqrt(head_dim) if spec.scale is None else spec.scale
    q, k, v, go = query.double(), _expand(key, heads), _expand(value, heads), grad_out.double()
    p, lse, slope, seen = _probabilities(q, k, spec, more)
    if more.bias is not None:
        p = p.masked_fill(((lse < NEGLIGIBLE) & lse.isfinite()).unsqueeze(-1), 0)
    keep = more.keep_factor(p.shape)
    delta = (go * _product(p * keep, v, seen)).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse.double().unsqueeze(-1)
    grad_biased = (p * (go @ v.mT * keep - delta)).masked_fill(~seen, 0)
    grad_scores = (grad_biased * slope).masked_fill(~seen, 0)
    grad_query = scale * _product(grad_scores, k, seen)
    grad_key = scale * _product(grad_scores.mT, q, seen.mT)
    grad_value = _product((p * keep).mT, go, seen.mT)
    grad_bias = None if more.bias is None else _sum_to(grad_biased, more.bias.shape)
    grad_sinks = None
    if more.sinks is not None:
        p_sink = torch.exp(more.sinks.double().unsqueeze(-1) - lse).masked_fill(lse == -math.inf, 0)
        grad_sinks = -(p_sink * delta.squeeze(-1)).sum((0, 2))

    def sum_group(x: Tensor) -> Tensor:
        return x.reshape(batch, kv_heads, heads // kv_heads, kv_len, x.shape[-1]).sum(2)

    return grad_query, sum_group(grad_key), sum_group(grad_value), grad_bias, grad_sinks
