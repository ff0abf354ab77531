"""Twins of the patterns that are no attention, or none that the op computes: each is left exactly as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pattern_inputs import hidden, minus
from site_helpers import compile_and_compare, qkv

# --- what is not: name -> (function, arguments, words of the reason; None: not even a site)

TWINS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str | None]] = {}


def twin(words: str | None, *more: Any, **sizes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        TWINS[fn.__name__] = (fn, (*qkv(**sizes), *more), words)
        return fn

    return add


@twin("over dim 2")
def softmax_over_queries(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, dim=2) @ v


@twin("over dim 1")
def softmax_over_heads(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, dim=1) @ v


@twin("several users")
def returned_probabilities(q, k, v):
    p = torch.softmax(q @ k.mT * 0.25, -1)
    return p @ v, p


@twin("an intermediate result of the attention")
def returned_scores(q, k, v):
    s = q @ k.mT * 0.25
    return torch.softmax(s, -1) @ v, s


@twin("does not hide them")
def mild_fill(q, k, v):
    return torch.softmax((q @ k.mT * 0.25).masked_fill(hidden(q.shape[2]), -1.0), -1) @ v


@twin("the same for all keys", torch.rand(12, requires_grad=True))
def scale_of_each_key(q, k, v, s):
    return torch.softmax(q @ k.mT * s, -1) @ v


@twin("isn't a positive number")
def negative_scale_of_masked_scores(q, k, v):
    return torch.softmax((q @ k.mT).masked_fill(hidden(q.shape[2]), -1e9) * -0.25, -1) @ v


@twin("isn't a positive number")
def negative_cap(q, k, v):
    return torch.softmax(torch.tanh(q @ k.mT * 0.25) * -5.0, -1) @ v


@twin("less precise than the inputs'")
def rounded_scores(q, k, v):
    return torch.softmax((q @ k.mT * 2.0).to(torch.bfloat16).float(), -1) @ v


@twin("less precise than the inputs'")
def rounded_probabilities(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1).to(torch.bfloat16).float() @ v


@twin("before the softmax")
def dropped_scores(q, k, v):
    return torch.softmax(F.dropout(q @ k.mT * 0.25, 0.5), -1) @ v


@twin("dropped out twice")
def two_dropouts(q, k, v):
    return F.dropout(F.dropout(torch.softmax(q @ k.mT * 0.25, -1), 0.5), 0.5) @ v


@twin("below 1")
def everything_dropped(q, k, v):
    return F.dropout(torch.softmax(q @ k.mT * 0.25, -1), 1.0) @ v


@twin("below 1")
def everything_dropped_in_sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=1.0)


@twin("tanh")
def mask_before_softcap(q, k, v):
    return (5 * torch.tanh((q @ k.mT * 0.25 + minus(q.shape[2], -1e9)) / 5)).softmax(-1) @ v


@twin("tanh")
def two_softcaps(q, k, v):
    return (5 * torch.tanh(torch.tanh(q @ k.mT))).softmax(-1) @ v


@twin("before the softcap")
def maximum_before_softcap(q, k, v):
    s = q @ k.mT
    return torch.softmax(5 * torch.tanh((s - s.amax(-1, keepdim=True)) / 5), -1) @ v


@twin("attention sinks")
def sinks(q, k, v):
    s = torch.cat([q @ k.mT * 0.25, torch.zeros(2, 4, q.shape[2], 1)], -1)
    return torch.softmax(s, -1)[..., :-1] @ v


@twin("sum of two products")
def content_bias(q, k, v):
    return torch.softmax(q @ k.mT + q @ q.mT, -1) @ v


@twin("transposed P")
def transposed_probabilities(q, k, v):
    return torch.einsum("bhqk,bhqd->bhkd", torch.softmax(q @ k.mT * 0.25, -1), v)


@twin("transpose")
def transposed_by_view(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1).transpose(-1, -2) @ v


@twin("over the keys alone")
def heads_summed(q, k, v):
    return torch.einsum("bhqk,bhkd->bqd", torch.softmax(q @ k.mT * 0.25, -1), v)


@twin("written to in place")
def value_changes_meanwhile(q, k, v):
    v = v * 1.0
    a = v.view(-1)
    p = torch.softmax(q @ k.mT * 0.25, -1)
    a.mul_(2.0)
    return p @ v


@twin("written to in place")
def query_changes_meanwhile(q, k, v):
    q = q.detach() + 0.5
    s = q @ k.detach().mT
    q.add_(1.0)
    return torch.softmax(s, -1) @ v


@twin("isn't a product")
def part_of_the_scores_is_written(q, k, v):
    s = (q @ k.mT).clone()
    s[..., 0] = 5.0
    return torch.softmax(s, -1) @ v


@twin("isn't a product")
def scores_written_through_a_view(q, k, v):
    s = (q @ k.mT).clone()
    s.view(-1).mul_(2.0)
    return torch.softmax(s, -1) @ v


@twin("seen elsewhere", torch.zeros(2, 12, 12))
def scores_written_into_an_input(q, k, v, buffer):
    buffer.baddbmm_(q[:, 0].detach(), k[:, 0].detach().mT, beta=0, alpha=0.25)
    return torch.softmax(buffer, -1) @ v[:, 0]


@twin("changes within")
def scores_without_grad(q, k, v):
    with torch.no_grad():
        s = q @ k.mT * 0.25
    return torch.softmax(s, -1) @ v


@twin("float64")
def wide_softmax(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1, dtype=torch.float64).float() @ v


@twin("forces an SDPA backend")
def forced_backend(q, k, v):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


@twin("a row of the mask may hide every key", kv_len=5)
def empty_rows_get_the_mean(q, k, v):
    m = torch.ones(q.shape[2], 5, dtype=torch.bool).tril(5 - q.shape[2])
    return torch.softmax((q @ k.mT).masked_fill(~m, -1e9), -1) @ v


@twin("detach")
def detached_scores(q, k, v):
    return torch.softmax((q @ k.mT).detach(), -1) @ v


@twin(None)
def router(q, k, v):
    w = torch.softmax(F.linear(q, k[0, 0]), -1)
    top, index = w.topk(2, -1)
    return (top / top.sum(-1, keepdim=True)).sum(-1) * index.float().sum(-1) + v.sum(-1)


@twin(None)
def loss(q, k, v):
    return -(torch.softmax(q @ k.mT, -1) + 1e-6).log().mean() + v.sum()


@pytest.mark.parametrize("name", TWINS)
def test_is_left_alone_and_equal(name: str) -> None:
    fn, args, words = TWINS[name]
    backend = compile_and_compare(fn, args, exact=True)
    assert not any(s.replaced for s in backend.sites)
    assert not any("flashbwd" in str(n.target) for gm in backend.graphs for n in gm.graph.nodes)
    if words is None:
        assert backend.sites == []
    else:
        assert len(backend.sites) == 1 and words in (backend.sites[0].reason or "")
