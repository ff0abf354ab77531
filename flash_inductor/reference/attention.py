"""The formulas of the package docstring, term by term."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..spec import AttentionSpec, MaskSpec


def visible(mask: MaskSpec, q_len: int, kv_len: int, device: torch.device | str = "cpu") -> Tensor:
    """Bool [q_len, kv_len]: True where the query (row) sees the key (column)."""
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


def _probabilities(query: Tensor, key: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p, lse, dz/ds and what is visible, for float64 inputs with equal numbers of heads."""
    scale = 1 / math.sqrt(query.shape[-1]) if spec.scale is None else spec.scale
    seen = visible(spec.mask, query.shape[2], key.shape[2], query.device)
    z = scale * (query @ key.mT)
    slope = torch.ones_like(z)
    if spec.softcap is not None:
        tanh = torch.tanh(z / spec.softcap)
        z, slope = spec.softcap * tanh, 1 - tanh**2
    z = z.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(z, -1)
    p = torch.exp(z - lse.unsqueeze(-1)).masked_fill(~seen, 0)
    return p, lse, slope, seen


def _expand(x: Tensor, heads: int) -> Tensor:
    return x.double().repeat_interleave(heads // x.shape[1], dim=1)


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec | None = None
) -> tuple[Tensor, Tensor]:
    """Output [B, Hq, Nq, Dv] and log-sum-exp [B, Hq, Nq], both float64, of any float inputs."""
    heads = query.shape[1]
    p, lse, _, seen = _probabilities(query.double(), _expand(key, heads), spec or AttentionSpec())
    return _product(p, _expand(value, heads), seen), lse


def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, float64; probabilities and output are recomputed from the inputs."""
    spec = spec or AttentionSpec()
    (batch, heads, _, head_dim), kv_heads, kv_len = query.shape, key.shape[1], key.shape[2]
    scale = 1 / math.sqrt(head_dim) if spec.scale is None else spec.scale
    q, k, v, go = query.double(), _expand(key, heads), _expand(value, heads), grad_out.double()
    p, _, slope, seen = _probabilities(q, k, spec)
    delta = (go * _product(p, v, seen)).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse.double().unsqueeze(-1)
    grad_scores = (p * (go @ v.mT - delta) * slope).masked_fill(~seen, 0)
    grad_query = scale * _product(grad_scores, k, seen)
    grad_key = scale * _product(grad_scores.mT, q, seen.mT)
    grad_value = _product(p.mT, go, seen.mT)

    def sum_group(x: Tensor) -> Tensor:
        return x.reshape(batch, kv_heads, heads // kv_heads, kv_len, x.shape[-1]).sum(2)

    return grad_query, sum_group(grad_key), sum_group(grad_value)
