"""Attention in random spellings, with at most a few details changed so that it isn't quite attention any more."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from . import changes

Fn = Callable[..., tuple[Tensor, ...]]
SIZES = {"even": (2, 4, 6, 6, 8), "square": (4, 4, 4, 4, 4), "cross": (2, 4, 5, 7, 8)}


@dataclass(frozen=True)
class Spelling:
    """How one attention is written; each field is one independent choice."""

    sizes: str  # a key of SIZES: batch, heads, queries, keys, head dim
    product: str
    layout: str
    scale: str
    heads: str
    mask: str
    hiding: str
    fill: float
    softcap: bool
    softmax: str
    dropout: str
    result: str


SPELLINGS = st.builds(
    Spelling,
    sizes=st.sampled_from(list(SIZES)),
    product=st.sampled_from(["matmul", "matmul", "sdpa", "einsum", "bmm", "baddbmm", "einsum bnhd"]),
    layout=st.sampled_from(["bhnd", "bnhd", "packed"]),
    scale=st.sampled_from(["mul", "div", "query", "key", "both", "none", "negative"]),
    heads=st.sampled_from(["plain", "plain", "repeat_interleave", "expand", "one"]),
    mask=st.sampled_from(
        ["none", "causal", "bottom right", "window", "segments", "padding", "bias", "random", "mixed"]
    ),
    hiding=st.sampled_from(["fill", "where", "add", "subtract", "in place"]),
    fill=st.sampled_from([-math.inf, -1e9, torch.finfo(torch.float64).min]),
    softcap=st.sampled_from([False, False, True]),
    softmax=st.sampled_from(["function", "functional", "method", "module", "shifted"]),
    dropout=st.sampled_from(["none", "eval", "zero"]),
    result=st.sampled_from(["bhnd", "bnhd", "merged"]),
)


def inputs(how: Spelling, seed: int) -> list[Tensor]:
    """query, key, value as the function takes them, key padding, segment ids, bias, another mask."""
    batch, heads, q_len, kv_len, dim = SIZES[how.sizes]
    kv_heads = {"plain": heads, "one": 1}.get(how.heads, heads // 2)
    g = torch.Generator().manual_seed(seed)

    def rand(*size: int) -> Tensor:
        return torch.randn(size, generator=g, dtype=torch.float64)

    if how.layout == "bhnd":
        qkv = [rand(batch, heads, q_len, dim), *(rand(batch, kv_heads, kv_len, dim) for _ in range(2))]
    else:
        qkv = [rand(batch, q_len, heads, dim), *(rand(batch, kv_len, kv_heads, dim) for _ in range(2))]
        if how.layout == "packed":
            qkv = [x.flatten(2) for x in qkv]
    pad = torch.rand(batch, kv_len, generator=g) > 0.3
    pad[:, 0] = True
    fat = torch.rand(batch, 1, q_len, kv_len, generator=g) > 0.3
    ids = torch.randint(0, 2, (batch, max(q_len, kv_len)), generator=g)
    return [*(x.requires_grad_() for x in qkv), pad, ids, rand(1, heads, q_len, kv_len).requires_grad_(), fat]


def make(how: Spelling, changed: frozenset[str] = frozenset()) -> Fn:
    """The function of :func:`inputs` in this spelling, with these of ``changes.CHANGES``."""
    batch, heads, q_len, kv_len, dim = SIZES[how.sizes]

    # looked up here, for Dynamo would trace the look-up
    here = {place: changes.at(changed, place) for place in changes.PLACES}
    more_results, softmax_dim = changes.more_results(changed), changes.softmax_dim(changed)
    swapped, shared, write_query, write_value = (name in changed for name in changes.OTHER)

    def changed_at(place: str, x: Tensor) -> Tensor:
        for change in here[place]:
            x = change(x)
        return x

    def split(x: Tensor) -> Tensor:
        if how.layout == "packed":
            x = x.view(batch, x.shape[1], -1, dim)
        return x if how.layout == "bhnd" else x.transpose(1, 2)

    def more_heads(x: Tensor) -> Tensor:
        group = heads // x.shape[1]
        if how.heads == "repeat_interleave":
            return x.repeat_interleave(group, 1)
        if how.heads == "expand":
            return x[:, :, None].expand(-1, -1, group, -1, -1).reshape(batch, heads, x.shape[2], dim)
        return x.expand(-1, heads, -1, -1)

    def visible(pad: Tensor, ids: Tensor, fat: Tensor) -> Tensor | None:
        row, column = torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :]
        same = ids[:, None, :q_len, None] == ids[:, None, None, :kv_len]
        keep = {
            "causal": lambda: column <= row,
            "bottom right": lambda: torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len),
            "window": lambda: (column <= row) & (row - column < 3),
            "segments": lambda: same,
            "padding": lambda: pad[:, None, None, :],
            "random": lambda: fat,
            "mixed": lambda: (column <= row) & pad[:, None, None, :] & same,
        }.get(how.mask)
        return None if keep is None else changed_at("mask", keep())

    def hide(s: Tensor, keep: Tensor) -> Tensor:
        if how.hiding == "fill":
            return s.masked_fill(~keep, how.fill)
        if how.hiding == "where":
            return torch.where(keep, s, torch.tensor(how.fill, dtype=s.dtype))
        if how.hiding == "in place":
            return s.masked_fill_(keep.logical_not(), how.fill)
        added = torch.zeros(keep.shape, dtype=s.dtype).masked_fill(~keep, how.fill)
        return s + added if how.hiding == "add" else s - added.neg()

    def product(q: Tensor, k: Tensor) -> Tensor:
        factor = -0.4 if how.scale == "negative" else 0.4
        if how.scale in ("query", "both"):
            q = q * factor**0.5 if how.scale == "both" else q * factor
        if how.scale in ("key", "both"):
            k = k * factor**0.5 if how.scale == "both" else k / (1 / factor)
        if how.product == "einsum":
            s = torch.einsum("bhid,bhjd->bhij", q, k)
        elif how.product == "einsum bnhd":
            s = torch.einsum("bihd,bjhd->bhij", q.transpose(1, 2), k.transpose(1, 2))
        elif how.product == "bmm":
            s = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(batch, heads, q_len, kv_len)
        elif how.product == "baddbmm":
            start = torch.empty(batch * heads, q_len, kv_len, dtype=q.dtype)
            s = torch.baddbmm(start, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=1.0)
            s = s.view(batch, heads, q_len, kv_len)
        else:
            s = torch.matmul(q, k.transpose(-1, -2))
        s = changed_at("raw scores", s)
        if how.scale in ("mul", "negative"):
            return s * factor
        return s / (1 / factor) if how.scale == "div" else s

    def softmax(s: Tensor) -> Tensor:
        dim = softmax_dim
        if how.softmax == "shifted":
            s = s - s.max(dim=-1, keepdim=True).values
        if how.softmax == "functional":
            return F.softmax(s, dim=dim, dtype=torch.float64)
        if how.softmax == "method":
            return s.softmax(dim)
        return torch.nn.Softmax(dim)(s) if how.softmax == "module" else torch.softmax(s, dim)

    def fn(q: Tensor, k: Tensor, v: Tensor, pad: Tensor, ids: Tensor, bias: Tensor, fat: Tensor) -> tuple[Any, ...]:
        q, k, v = split(q), more_heads(split(k)), more_heads(split(v))
        if swapped:
            q, k = k, q
        if shared:
            v = k
        q, k, v = changed_at("query", q), changed_at("key", k), changed_at("value", v)
        keep = visible(pad, ids, fat)
        more: list[Tensor] = []
        if how.product == "sdpa":
            mask = bias if how.mask == "bias" else keep
            if keep is not None and how.hiding in ("add", "subtract"):
                mask = torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, how.fill)
            scale = -0.4 if how.scale == "negative" else None if how.scale == "none" else 0.4
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        else:
            s = product(q, k)
            if write_query:
                q = q.mul_(2.0) if q.grad_fn is not None else q
            if how.softcap:
                s = 3.0 * torch.tanh(s / 3.0)
            s = changed_at("scores", s)
            if how.mask == "bias":
                s = s + bias
            if keep is not None:
                s = hide(s, keep)
            s = changed_at("masked scores", s)
            p = softmax(s)
            p = changed_at("probabilities", p)
            if how.dropout != "none":
                p = F.dropout(p, 0.0 if how.dropout == "zero" else 0.5, training=how.dropout == "zero")
            if write_value:
                v = v.clone().mul_(0.5)
            if how.product in ("bmm", "baddbmm"):
                out = torch.bmm(p.flatten(0, 1), v.flatten(0, 1)).view(batch, heads, q_len, dim)
            else:
                out = torch.einsum("bhij,bhjd->bhid", p, v) if "einsum" in how.product else p @ v
            more = [result(s, p, out) for result in more_results]
        out = changed_at("result", out)
        if keep is not None:  # what a row that sees nothing gets differs by form, and is documented
            out = torch.where(keep.any(-1, keepdim=True), out, 0.0)
        if how.result != "bhnd":
            out = out.transpose(1, 2)
        return (out.reshape(batch, q_len, heads * dim) if how.result == "merged" else out), *more

    return fn
