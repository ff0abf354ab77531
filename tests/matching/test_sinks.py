"""Attention sinks: one more column of the scores, cut off after the softmax (gpt-oss)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from site_helpers import compile_and_compare, qkv

MIN = torch.finfo(torch.float32).min


def causal(n: int, window: int | None = None) -> torch.Tensor:
    i = torch.arange(n)
    distance = i[None, :] - i[:, None]
    seen = distance <= 0
    if window is not None:
        seen = seen & (distance > -window)
    return torch.where(seen, 0.0, MIN)


def repeat(x: torch.Tensor, n: int) -> torch.Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, n, s, d).reshape(b, h * n, s, d)


def column(sinks: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[-2], -1)


FORMS: dict[str, Callable[..., torch.Tensor]] = {}


def form(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    FORMS[fn.__name__] = fn
    return fn


@form
def gpt_oss(q, k, v, sinks):
    k, v = repeat(k, 2), repeat(v, 2)
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.25 + causal(q.shape[2], 5)
    both = torch.cat([scores, column(sinks, scores)], dim=-1)
    both = both - both.max(dim=-1, keepdim=True).values
    p = F.softmax(both, dim=-1, dtype=both.dtype)[..., :-1]
    return torch.matmul(F.dropout(p, p=0.0, training=True).to(v.dtype), v).transpose(1, 2).contiguous()


@form
def without_shift(q, k, v, sinks):
    k, v = repeat(k, 2), repeat(v, 2)
    scores = q @ k.mT * 0.25
    return torch.softmax(torch.cat((scores, column(sinks, scores)), -1), -1)[:, :, :, :-1] @ v


@form
def sink_first(q, k, v, sinks):
    k, v = repeat(k, 2), repeat(v, 2)
    scores = q @ k.mT * 0.25 + causal(q.shape[2])
    return torch.softmax(torch.cat([column(sinks, scores), scores], -1), -1)[..., 1:] @ v


@form
def cut_by_narrow(q, k, v, sinks):
    k, v = repeat(k, 2), repeat(v, 2)
    scores = q @ k.mT * 0.25
    p = torch.softmax(torch.cat([scores, column(sinks, scores)], -1), -1)
    return p.narrow(-1, 0, k.shape[2]) @ v


@form
def grouped_einsum(q, k, v, sinks):
    """The reference code of gpt-oss, with a batch."""
    b, h, n, d = q.shape
    q = q.view(b, h // 2, 2, n, d)
    scores = torch.einsum("bhmqd,bhkd->bhmqk", q, k) * 0.25 + causal(n)
    s = sinks.reshape(h // 2, 2, 1, 1).expand(b, -1, -1, n, -1)
    p = torch.softmax(torch.cat([scores, s], dim=-1), dim=-1)[..., :-1]
    return torch.einsum("bhmqk,bhkd->bhmqd", p, v).reshape(b, h, n, d)


@form
def sinks_by_unsqueeze(q, k, v, sinks):
    k, v = repeat(k, 2), repeat(v, 2)
    scores = q @ k.mT * 0.25
    s = sinks[None, :, None, None].to(scores.dtype).expand(q.shape[0], q.shape[1], q.shape[2], 1)
    return torch.softmax(torch.cat([scores, s], -1), -1)[..., :-1] @ v


@form
def detached(q, k, v, sinks):
    k, v = repeat(k, 2), repeat(v, 2)
    scores = q @ k.mT * 0.25
    p = torch.softmax(torch.cat([scores, column(sinks.detach(), scores)], -1), -1)
    return p[..., :-1] @ v + sinks.sum()


def sinks_of(heads: int = 4) -> torch.Tensor:
    return torch.linspace(-1, 2, heads).requires_grad_()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_is_replaced(name: str, dynamic: bool) -> None:
    args = qkv(kv_heads=2)
    if dynamic:
        for x in args:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 2)
    backend = compile_and_compare(FORMS[name], (*args, sinks_of()))
    assert [s.replaced for s in backend.sites] == [True], backend.sites[0].reason
    spec = backend.sites[0].spec
    assert spec is not None and spec.extras == ("sinks",)
    assert "cat" not in backend.ops() and "softmax" not in backend.ops()


def test_window_of_gpt_oss() -> None:
    backend = compile_and_compare(gpt_oss, (*qkv(kv_heads=2), sinks_of()))
    spec = backend.sites[0].spec
    assert spec is not None and (spec.mask.lower, spec.mask.upper) == (-4, 0)


def test_bfloat16() -> None:
    args = [x.detach().bfloat16().requires_grad_() for x in (*qkv(kv_heads=2), sinks_of())]
    backend = compile_and_compare(gpt_oss, args)
    assert [s.replaced for s in backend.sites] == [True]


# --- left alone

TWINS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {}


def twin(*sizes: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        TWINS[fn.__name__] = (fn, sizes)
        return fn

    return add


def with_column(scores: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.cat([scores, s], -1), -1)


@twin(4)
def another_column_is_cut(q, k, v, sinks):
    scores = q @ k.mT * 0.25
    return with_column(scores, column(sinks, scores))[..., 1:] @ v


@twin(4)
def two_columns(q, k, v, sinks):
    scores = q @ k.mT * 0.25
    s = column(sinks, scores)
    return with_column(scores, torch.cat([s, s * 0.5], -1))[..., :-2] @ v


@twin(4)
def scaled_with_the_sinks(q, k, v, sinks):
    scores = q @ k.mT
    return torch.softmax(torch.cat([scores, column(sinks, scores)], -1) * 0.25, -1)[..., :-1] @ v


@twin(4)
def not_cut(q, k, v, sinks):
    scores = q @ k.mT * 0.25
    return with_column(scores, column(sinks, scores)) @ torch.cat([v, v[:, :, :1]], 2)


@twin(12)
def one_for_each_query(q, k, v, sinks):
    scores = q @ k.mT * 0.25
    return with_column(scores, sinks.view(1, 1, -1, 1).expand(2, 4, -1, -1))[..., :-1] @ v


@twin(2)
def one_for_each_batch_entry(q, k, v, sinks):
    scores = q @ k.mT * 0.25
    return with_column(scores, sinks.view(-1, 1, 1, 1).expand(-1, 4, 12, -1))[..., :-1] @ v


@twin(1)
def one_for_all_heads(q, k, v, sinks):
    scores = q @ k.mT * 0.25
    return with_column(scores, sinks.view(1, 1, 1, 1).expand(2, 4, 12, -1))[..., :-1] @ v


@twin(4)
def cut_with_a_step(q, k, v, sinks):
    scores = q @ k.mT * 0.25
    return with_column(scores, column(sinks, scores))[..., 0:24:2] @ v[:, :, :7]


@pytest.mark.parametrize("name", TWINS)
def test_is_left_alone(name: str) -> None:
    fn, sizes = TWINS[name]
    backend = compile_and_compare(fn, (*qkv(), torch.linspace(-1, 2, *sizes).requires_grad_()), exact=True)
    assert [s.replaced for s in backend.sites] == [False]
    assert backend.sites[0].reason
