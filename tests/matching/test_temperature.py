"""Scores multiplied or divided by a tensor that is the same for all keys: the query takes it on itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from site_helpers import Rewriter, compile_and_compare, qkv, run
from torch import Tensor

from flash_inductor.spec import MaskSpec


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(shape, generator=generator) + 0.5).to(dtype).requires_grad_()


def check(fn: Callable[..., Tensor], args: tuple[Tensor, ...], dynamic: bool | None = None) -> Rewriter:
    """Compile ``fn``; output and gradients must be as near to float64's as the eager ones are.

    The gradient of a temperature is a sum over all pairs, most of which cancels: in float32 eager isn't the truth.
    """
    torch._dynamo.reset()
    backend = Rewriter()
    ours = run(torch.compile(fn, backend=backend, dynamic=dynamic), args)
    wide = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in args]
    eager, exact = run(fn, args), run(fn, wide)
    assert len(ours) == len(eager) == len(exact)
    for mine, theirs, truth in zip(ours, eager, exact, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        tiny = 16 * torch.finfo(theirs.dtype).eps * truth.norm()
        assert (mine - truth).norm() <= 3 * (theirs - truth).norm() + tiny
    return backend


def hidden(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def scalar(q, k, v, t):
    return (q @ k.mT * t.exp()).softmax(-1) @ v


def on_the_left(q, k, v, t):
    return (t * (q @ k.mT)).softmax(-1) @ v


def divided(q, k, v, t):
    return (q @ k.mT / t).softmax(-1) @ v


def in_place(q, k, v, t):
    s = q @ k.mT
    s *= t
    return s.softmax(-1) @ v


def cosine(q, k, v, t):
    return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * t.clamp(max=4.6).exp()).softmax(-1) @ v


def twice(q, k, v, t):
    return (q @ k.mT * t * 0.25 / t.exp()).softmax(-1) @ v


def causal(q, k, v, t):
    return (q @ k.mT * t).masked_fill(hidden(q.shape[2]), float("-inf")).softmax(-1) @ v


def capped(q, k, v, t):
    return (3.0 * torch.tanh(q @ k.mT * t / 3.0)).softmax(-1) @ v


def merged_heads(q, k, v, t):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    t = t.expand(2, 4, 1, 1).flatten(0, 1)
    return (torch.bmm(q, k.mT) * t).softmax(-1) @ v


def heads_first(q, k, v, t):
    return torch.einsum("hbqk,bhkd->bhqd", (torch.einsum("bhqd,bhkd->hbqk", q, k) * t.transpose(0, 1)).softmax(-1), v)


def regrouped(q, k, v, t):
    s = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).unflatten(0, q.shape[:2]) * t
    return torch.bmm(s.flatten(0, 1).softmax(-1), v.flatten(0, 1)).unflatten(0, q.shape[:2])


def shifted(q, k, v, t):
    s = q @ k.mT
    return ((s - s.max(-1, keepdim=True)[0]) * t).softmax(-1) @ v


FORMS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "scalar": (scalar, ()),
    "one number": (scalar, (1,)),
    "on the left": (on_the_left, (4, 1, 1)),
    "heads": (on_the_left, (1, 4, 1, 1)),
    "batch": (on_the_left, (2, 1, 1, 1)),
    "queries": (divided, (4, 12, 1)),
    "queries of all heads": (divided, (12, 1)),
    "divided": (divided, ()),
    "in place": (in_place, (4, 1, 1)),
    "cosine": (cosine, (4, 1, 1)),
    "twice": (twice, (4, 1, 1)),
    "causal": (causal, (4, 1, 1)),
    "capped": (capped, (4, 1, 1)),
    "merged heads": (merged_heads, (1, 4, 1, 1)),
    "heads first": (heads_first, (1, 4, 1, 1)),
    "regrouped": (regrouped, (4, 1, 1)),
    "shifted": (shifted, (4, 1, 1)),
}


@pytest.mark.parametrize("dynamic", [False, None, True])
@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str, dynamic: bool | None) -> None:
    fn, shape = FORMS[name]
    done = check(fn, (*qkv(), random(*shape)), dynamic)
    (site,) = done.sites
    assert site.replaced, site.reason
    assert site.spec.mask == (MaskSpec(None, 0) if name == "causal" else MaskSpec())
    assert site.spec.softcap == (3.0 if name == "capped" else None)
    assert not site.spec.extras
    assert "softmax" not in done.ops() and "matmul" not in done.ops()


def test_grouped_heads() -> None:
    def fn(q, k, v, t):
        q = q.unflatten(1, (2, 2))
        s = torch.einsum("bgrqd,bgkd->bgrqk", q, k) * t
        return torch.einsum("bgrqk,bgkd->bgrqd", s.softmax(-1), v).flatten(1, 2)

    done = check(fn, (*qkv(heads=4, kv_heads=2), random(2, 2, 1, 1)))
    assert done.sites[0].replaced, done.sites[0].reason


def test_with_a_bias_and_padding() -> None:
    def fn(q, k, v, t, bias, keep):
        s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * t + bias
        return s.masked_fill(~keep[:, None, None], float("-inf")).softmax(-1) @ v

    keep = torch.arange(12)[None] < torch.tensor([[12], [7]])
    done = check(fn, (*qkv(), random(4, 1, 1), random(4, 12, 12), keep))
    assert done.sites[0].spec.extras == ("padding", "bias")


def test_under_autocast() -> None:
    def fn(q, k, v, t):
        with torch.autocast("cpu", torch.bfloat16, enabled=q.dtype is torch.float32):
            return cosine(q, k, v, t)

    done = check(fn, (*qkv(), random(4, 1, 1)))
    assert done.sites[0].replaced, done.sites[0].reason


def test_a_wide_temperature_does_not_widen_the_op() -> None:
    def fn(q, k, v, t):
        return ((q @ k.mT).float() * t).softmax(-1).to(v.dtype) @ v

    done = check(fn, (*qkv(dtype=torch.bfloat16), random(4, 1, 1)))
    assert done.sites[0].replaced, done.sites[0].reason
    (op,) = (n for n in done.graphs[0].graph.nodes if "attn" in str(n.target))
    assert {x.meta["example_value"].dtype for x in op.args} == {torch.bfloat16}


def after_a_mask(q, k, v, t):
    return ((q @ k.mT).masked_fill(hidden(q.shape[2]), -1e9) * t).softmax(-1) @ v


def after_a_bias(q, k, v, t):
    return ((q @ k.mT + torch.arange(12)) * t).softmax(-1) @ v


def after_the_softcap(q, k, v, t):
    return (torch.tanh(q @ k.mT) * t).softmax(-1) @ v


def over_keys(q, k, v, t):
    return (q @ k.mT * t.mT).softmax(-1) @ v


def divides(q, k, v, t):
    return (t / (q @ k.mT)).softmax(-1) @ v


def of_the_scores(q, k, v, t):
    s = q @ k.mT
    return (s * t / s.norm(dim=-1, keepdim=True)).softmax(-1) @ v


def written_later(q, k, v, t):
    t = t.clone()
    out = (q @ k.mT * t).softmax(-1)
    t.zero_()
    return out @ v


@pytest.mark.parametrize(
    ("fn", "shape", "reason"),
    [
        (after_a_mask, (4, 1, 1), "masked or capped scores are scaled by the tensor"),
        (after_a_bias, (4, 1, 1), "masked or capped scores are scaled by the tensor"),
        (after_the_softcap, (4, 1, 1), "masked or capped scores are scaled by the tensor"),
        (over_keys, (4, 12, 1), "neither a constant nor a tensor that is the same for all keys"),
        (divides, (4, 1, 1), "neither a constant nor a tensor that is the same for all keys"),
        (of_the_scores, (), "an intermediate result"),
    ],
)
def test_left_alone(fn: Any, shape: tuple[int, ...], reason: str) -> None:
    (site,) = compile_and_compare(fn, (*qkv(), random(*shape))).sites
    assert not site.replaced and reason in site.reason


def test_written_to_after_its_use() -> None:
    q, k, v = (x.detach() for x in qkv())
    (site,) = compile_and_compare(written_later, (q, k, v, random(4, 1, 1).detach())).sites
    assert not site.replaced and "written to in place" in site.reason
