"""Structures of real models through Inductor on the CPU, with all outputs and gradients against eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import flash_inductor
from flash_inductor.report import Site, collect

N, D, H = 16, 32, 4


def compare(model: nn.Module, *args: Any, tolerance: float = 2e-5, **compile_args: Any) -> list[Site]:
    """Compiled with the switch on against eager: the output, and gradients of floating inputs and parameters."""

    def run(fn: Callable[..., Any]) -> list[torch.Tensor]:
        out = fn(*args)
        needy = [x for x in (*args, *model.parameters()) if isinstance(x, torch.Tensor) and x.requires_grad]
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
        return [out.detach(), *torch.autograd.grad(out, needy, cotangent.to(out.dtype))]

    expected = run(model)
    with flash_inductor.enabled(), collect() as sites:
        actual = run(torch.compile(model, fullgraph=True, **compile_args))
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype is e.dtype
        torch.testing.assert_close(a.float(), e.float(), atol=tolerance * float(e.abs().max()), rtol=0)
    return sites


def replaced(sites: list[Site]) -> list[bool]:
    return [s.replaced for s in sites]


def x_of(*more: int) -> torch.Tensor:
    return torch.randn(2, N, D, generator=torch.Generator().manual_seed(1)).requires_grad_()


class Layer(nn.Module):
    """Projections around ``attend(q, k, v, *more)``."""

    def __init__(self, attend: Callable[..., torch.Tensor], kv_heads: int = H, value_dim: int | None = None) -> None:
        super().__init__()
        self.attend, self.kv_heads = attend, kv_heads
        head = D // H
        self.q = nn.Linear(D, D)
        self.k = nn.Linear(D, kv_heads * head, bias=False)  # softmax doesn't see it: its gradient is noise
        self.v = nn.Linear(D, kv_heads * (value_dim or head))
        self.out = nn.Linear(H * (value_dim or head), D)

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (H, -1)).transpose(1, 2)
        k, v = (p(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for p in (self.k, self.v))
        return x + self.out(self.attend(q, k, v, *more).transpose(1, 2).flatten(2))


def causal_mask(n: int) -> torch.Tensor:
    i = torch.arange(n)
    return (i[None, :] <= i[:, None])[None, None]


# --- nn.MultiheadAttention and nn.Transformer*


@pytest.mark.parametrize("padded", [False, True])
def test_transformer_encoder(padded: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, H, 64, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
            y = self.encoder(x, src_key_padding_mask=padding)
            return y if padding is None else y.masked_fill(padding[..., None], 0.0)

    padding = torch.zeros(2, N, dtype=torch.bool)
    padding[1, -5:] = True
    sites = compare(Model(), x_of(), padding if padded else None)
    assert replaced(sites) == [True, True], [s.reason for s in sites]


def test_weights_that_are_asked_for_but_unused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attn = nn.MultiheadAttention(D, H, batch_first=True)
            self.probe = nn.Parameter(torch.randn(1, 1, D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # SigLIP's pooling head
            return self.attn(self.probe.repeat(x.shape[0], 1, 1), x, x)[0]

    assert replaced(compare(Model(), x_of())) == [True]


def test_a_causal_mask_in_a_float_buffer() -> None:
    class Model(nn.Module):  # open_clip's text tower
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attn = nn.MultiheadAttention(D, H)
            self.register_buffer("mask", torch.full((N, N), float("-inf")).triu(1), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.transpose(0, 1)
            return self.attn(x, x, x, need_weights=False, attn_mask=self.mask)[0].transpose(0, 1)

    sites = compare(Model(), x_of())
    assert replaced(sites) == [True]
    assert sites[0].spec is not None and sites[0].spec.mask.upper == 0


# --- sinks


def test_sinks_and_their_gradient() -> None:
    class Sinks(Layer):
        def __init__(self) -> None:
            super().__init__(self.with_sinks, kv_heads=2)
            self.sinks = nn.Parameter(torch.linspace(-1, 1, H))

        def with_sinks(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            scores = q @ k.mT * q.shape[-1] ** -0.5 + torch.where(
                causal_mask(q.shape[2]), 0.0, torch.finfo(q.dtype).min
            )
            sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
            both = torch.cat([scores, sinks], dim=-1)
            both = both - both.max(dim=-1, keepdim=True).values
            return F.softmax(both, dim=-1, dtype=both.dtype)[..., :-1] @ v

    torch.manual_seed(0)
    sites = compare(Sinks(), x_of())
    assert replaced(sites) == [True] and sites[0].spec is not None and sites[0].spec.extras == ("sinks",)


# --- gradient checkpointing


class Checkpointed(nn.Module):
    def __init__(self, mask: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask = mask
        self.layers = nn.ModuleList([Layer(self.attend), Layer(self.attend)])

    @staticmethod
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        mask = self.mask(x, *more)
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=False)
        return x


@pytest.mark.parametrize("dynamic", [None, True])
def test_checkpoint_bodies_with_a_causal_mask_from_outside(dynamic: bool | None) -> None:
    sites = compare(Checkpointed(lambda x: causal_mask(x.shape[1])), x_of(), dynamic=dynamic)
    assert replaced(sites) == [True, True]
    assert all(s.spec is not None and s.spec.mask.upper == 0 and not s.spec.extras for s in sites)


def test_checkpoint_bodies_with_padding_from_outside() -> None:
    def mask(x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return causal_mask(x.shape[1]) & padding.bool()[:, None, None, :]

    padding = torch.ones(2, N, dtype=torch.long)
    padding[1, -3:] = 0
    sites = compare(Checkpointed(mask), x_of(), padding)
    assert replaced(sites) == [True, True]
    assert all(s.spec is not None and s.spec.extras == ("padding",) and s.spec.mask.upper == 0 for s in sites)


# --- layers compiled one by one


def test_a_mask_that_is_an_input_of_the_compiled_layer() -> None:
    torch.manual_seed(0)
    layer = Layer(Checkpointed.attend)
    sites = compare(layer, x_of(), causal_mask(N))
    assert replaced(sites) == [True]


# --- KV caches


class Cached(nn.Module):
    """Prefill of a static cache: keys and values are written into buffers, and attention reads the buffers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.proj = nn.Linear(D, 3 * D)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        q, k, v = self.proj(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        n = x.shape[1]
        if self.how == "index_copy":
            where = torch.arange(n)
            keys.index_copy_(2, where, k)
            values.index_copy_(2, where, v)
            i, j = torch.arange(n), torch.arange(keys.shape[2])
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=(j[None, :] <= i[:, None])[None, None])
        elif self.how == "setitem":
            keys[:, :, :n] = k
            values[:, :, :n] = v
            y = F.scaled_dot_product_attention(q, keys[:, :, :n], values[:, :, :n], is_causal=True)
        else:
            k, v = torch.cat([keys[:, :, :4], k], -2), torch.cat([values[:, :, :4], v], -2)
            i, j = torch.arange(n), torch.arange(n + 4)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=(j[None, :] <= i[:, None] + 4)[None, None])
        return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("how", ["index_copy", "setitem", "cat"])
def test_prefill_of_a_cache(how: str) -> None:
    model, x = Cached(how), x_of().detach()
    caches = [torch.randn(2, H, 24, D // H, generator=torch.Generator().manual_seed(i)) for i in (2, 3)]
    mine = [c.clone() for c in caches]
    with torch.no_grad():
        expected = model(x, *caches)
        with flash_inductor.enabled(), collect() as sites:
            actual = torch.compile(model, fullgraph=True)(x, *mine)
    assert replaced(sites) == [True], sites[0].reason
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(mine, caches)


def test_training_through_a_cache_in_the_graph() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        empty = q.new_empty(q.shape[0], H, 0, q.shape[-1])  # what a DynamicCache starts with
        return F.scaled_dot_product_attention(q, torch.cat([empty, k], -2), torch.cat([empty, v], -2), is_causal=True)

    torch.manual_seed(0)
    assert replaced(compare(Layer(attend), x_of())) == [True]


# --- keys built by mutation (DeepSeek), a value narrower than the query


def test_keys_built_by_assignment() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        key = k.new_empty(k.shape)
        key[..., :3] = k[..., :3]
        key[..., 3:] = k[..., 3:] * 2
        scores = q @ key.mT * 0.3 + torch.where(causal_mask(q.shape[2]), 0.0, float("-inf"))
        return torch.softmax(scores, -1) @ v

    torch.manual_seed(0)
    assert replaced(compare(Layer(attend), x_of())) == [True]


def test_keys_that_are_overwritten_after_use() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        key = k * 1.0
        scores = q @ key.mT * 0.3
        with torch.no_grad():
            key[..., :3] = 0.0
        return torch.softmax(scores, -1) @ v

    torch.manual_seed(0)
    layer, x = Layer(attend), x_of()
    with torch.no_grad(), flash_inductor.enabled(), collect() as sites:
        torch.testing.assert_close(torch.compile(layer)(x), layer(x))
    assert replaced(sites) == [False]


@pytest.mark.parametrize("value_dim", [4, 12])
def test_a_value_of_another_width(value_dim: int) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.4)

    torch.manual_seed(0)
    assert replaced(compare(Layer(attend, value_dim=value_dim), x_of())) == [True]


# --- autocast


@pytest.mark.parametrize("form", ["sdpa", "eager"])
def test_query_and_key_wider_than_value_under_autocast(form: str) -> None:
    """Rotary embeddings leave query and key in float32, while the projection of the value is bfloat16."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k = q.float() * torch.ones(()), k.float() * torch.ones(())
        if form == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
        scores = scores + torch.where(causal_mask(q.shape[2]), 0.0, torch.finfo(scores.dtype).min)
        return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)

    class Model(Layer):
        def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    torch.manual_seed(0)
    sites = compare(Model(attend), x_of(), tolerance=0.03)
    assert replaced(sites) == [True], sites[0].reason


# --- regions compiled once and called several times


@pytest.mark.skipif(not hasattr(torch.compiler, "nested_compile_region"), reason="this torch has no such regions")
@pytest.mark.parametrize("several", [False, True])
def test_regions_with_masks_from_outside(several: bool) -> None:
    """One mask is proved; several stay arguments, which Inductor may overwrite before the backward."""

    @torch.compiler.nested_compile_region
    def layer(x: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q = (x @ weight).unflatten(-1, (H, -1)).transpose(1, 2)
        return x + F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).flatten(2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weights = nn.ParameterList(torch.randn(D, D) * 0.2 for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            full = causal_mask(x.shape[1])
            near = full & causal_mask(x.shape[1]).logical_not().logical_or(full).triu(-3) if several else full
            return layer(layer(x, self.weights[0], full), self.weights[1], near)

    sites = compare(Model(), x_of())
    assert replaced(sites) == [not several]
