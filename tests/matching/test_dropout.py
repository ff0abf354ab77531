"""Active dropout on the probabilities, compared with the reference for the same random state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from site_helpers import Rewriter, qkv

from flash_inductor.reference import attention_backward, attention_forward
from flash_inductor.spec import AttentionSpec, MaskSpec

P = 0.3
CASES: dict[str, tuple[Callable[..., torch.Tensor], AttentionSpec]] = {}


def case(**spec: Any) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
    def add(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        CASES[fn.__name__] = (fn, AttentionSpec(**spec))
        return fn

    return add


def later(n: int) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


@case()
def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=P)


@case(mask=MaskSpec(upper=0))
def sdpa_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=P, is_causal=True)


@case(scale=0.25)
def eager(q, k, v):
    return F.dropout(torch.softmax(q @ k.mT * 0.25, -1), P) @ v


@case(scale=0.25, mask=MaskSpec(upper=0))
def hugging_face(q, k, v):
    scores = q @ k.mT * 0.25 + torch.where(later(q.shape[2]), torch.finfo(q.dtype).min, 0.0)
    p = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return F.dropout(p, p=P, training=True) @ v


@case(scale=0.25)
def in_place(q, k, v):
    return F.dropout(torch.softmax(q @ k.mT * 0.25, -1), P, inplace=True) @ v


@case(scale=0.25, mask=MaskSpec(upper=0))
def masked_and_cast_after(q, k, v):
    p = F.dropout(torch.softmax((q @ k.mT * 0.25).masked_fill(later(q.shape[2]), float("-inf")), -1), P)
    return p.type_as(v) @ v


@case(scale=0.25)
def three_dims(q, k, v):
    b, h, n, d = q.shape
    q, k, v = (x.reshape(b * h, -1, d) for x in (q, k, v))
    return torch.bmm(F.dropout(torch.bmm(q, k.mT).mul(0.25).softmax(-1), P), v).view(b, h, n, d)


@case(scale=0.25)
def einsum(q, k, v):
    p = F.dropout(torch.einsum("bhqd,bhkd->bhqk", q, k).mul(0.25).softmax(-1), P)
    return torch.einsum("bhqk,bhkd->bhqd", p, v)


def expected(args: Any, spec: AttentionSpec, state: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    q, k, v = (x.detach() for x in args)
    extras = {"rng_state": state, "dropout_p": P}
    out, _ = attention_forward(q, k, v, spec, **extras)
    return [out, *attention_backward(g, None, q, k, v, spec, **extras)[:3]]


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference_for_the_same_state(name: str) -> None:
    fn, spec = CASES[name]
    args = qkv()
    backend = Rewriter()
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend)
    torch.manual_seed(11)
    out = compiled(*args)
    torch.manual_seed(11)
    state = torch.randint(0, 2**62, (2,), dtype=torch.int64)
    assert [s.replaced for s in backend.sites] == [True], backend.sites[0].reason
    assert backend.sites[0].spec is not None and "dropout 0.3" in backend.sites[0].spec.extras
    assert "dropout" not in backend.ops()
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    actual = [out, *torch.autograd.grad(out, args, g)]
    for a, e in zip(actual, expected(args, spec, state, g), strict=True):
        torch.testing.assert_close(a.double(), e, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["sdpa_causal", "eager"])
def test_the_mean_over_many_states_is_the_attention_without_dropout(name: str) -> None:
    fn, spec = CASES[name]
    q, k, v = (x.detach() for x in qkv(heads=2, batch=1, q_len=6))
    compiled = torch.compile(fn, backend=Rewriter())
    torch._dynamo.reset()
    torch.manual_seed(0)
    runs = torch.stack([compiled(q, k, v) for _ in range(600)])
    exact, _ = attention_forward(q, k, v, spec)
    error = (runs.double().mean(0) - exact) / (runs.double().std(0) / len(runs) ** 0.5).clamp_min(1e-9)
    assert error.abs().max() < 5.5, "a normal variable of 192 that deviates so far has a chance of 1e-5"
    assert runs.std(0).max() > 0


def test_inactive_dropout_costs_nothing() -> None:
    def f(q, k, v, training):
        return F.dropout(torch.softmax(q @ k.mT * 0.25, -1), P, training=training) @ v

    for training, draws in ((False, 0), (True, 1)):
        backend = Rewriter()
        torch._dynamo.reset()
        torch.compile(f, backend=backend)(*qkv(), training)
        assert backend.sites[0].replaced
        assert backend.ops().count("randint") == draws


def test_module_in_training_and_evaluation() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(P)

        def forward(self, q, k, v):
            return self.drop(torch.softmax(q @ k.mT * 0.25, -1)) @ v

    block, args = Block(), qkv()
    backend = Rewriter()
    torch._dynamo.reset()
    compiled = torch.compile(block, backend=backend)
    compiled(*args)
    block.eval()
    torch.testing.assert_close(compiled(*args), block(*args), atol=1e-6, rtol=0)
    assert [s.spec.extras for s in backend.sites if s.spec is not None] == [("dropout 0.3",), ()]


def test_symbolic_probability_is_made_a_constant() -> None:
    """A number that changes becomes a symbol, under dynamic=True at once."""

    def f(q, k, v, p):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p)

    backend = Rewriter()
    torch._dynamo.reset()
    compiled = torch.compile(f, backend=backend)
    for p in (0.25, 0.5, 0.5, 0.75):
        compiled(*qkv(), p)
    assert [s.reason for s in backend.sites] == [None] * 3
    assert [s.spec.extras for s in backend.sites if s.spec is not None] == [
        ("dropout 0.25",),
        ("dropout 0.5",),
        ("dropout 0.75",),
    ]


def test_two_sites_draw_their_own_state() -> None:
    def f(q, k, v):
        return torch.stack([sdpa(q, k, v), sdpa(q, k, v)])

    torch._dynamo.reset()
    backend = Rewriter()
    a, b = torch.compile(f, backend=backend)(*qkv())
    assert [s.replaced for s in backend.sites] == [True, True]
    assert not torch.allclose(a, b)


def test_multi_head_attention_module() -> None:
    torch.manual_seed(0)
    attn = nn.MultiheadAttention(32, 4, dropout=P, batch_first=True)
    x = torch.randn(2, 6, 32)
    torch._dynamo.reset()
    backend = Rewriter()
    compiled = torch.compile(lambda x: attn(x, x, x, need_weights=False)[0], backend=backend)
    torch.manual_seed(1)
    runs = torch.stack([compiled(x) for _ in range(400)])
    assert [s.spec.extras for s in backend.sites if s.spec is not None] == [("dropout 0.3",)]
    attn.eval()
    exact = attn(x, x, x, need_weights=False)[0]
    error = (runs.mean(0) - exact) / (runs.std(0) / len(runs) ** 0.5)
    assert error.abs().max() < 5.5
