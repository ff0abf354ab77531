"""What the tests here compile and compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What the plugin replaces."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def softcapped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A chain that no fused kernel of torch computes."""
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    scores = 5.0 * torch.tanh(scores / 5.0)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ value


def make_qkv(length: int = 32, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, ...]:
    """query, key, value [2, 2, length, 16], requiring gradients."""
    return tuple(torch.randn(2, 2, length, 16, dtype=dtype, device=device, requires_grad=True) for _ in range(3))


class Attention(nn.Module):
    """Causal self-attention with separate projections, as adapters and quantisers like it."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(causal(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    """[batch, length, dim] to the same."""

    def __init__(self, dim: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def step(
    function: Callable[..., Any], inputs: Sequence[Tensor], parameters: Iterable[Tensor] = ()
) -> list[Tensor | None]:
    """The output, and the gradients of those inputs and parameters that need one."""
    leaves = [x for x in (*inputs, *parameters) if x.requires_grad]
    for x in leaves:
        x.grad = None
    out = function(*inputs)
    out.float().square().mean().backward()
    grads = [x.grad for x in leaves]
    for x in leaves:
        x.grad = None
    return [out.detach(), *grads]
