"""Models for the command line's tests, as a user has them: ``tests.cli.factories:plain`` and so on."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention over [batch, length, 32]; with ``unknown`` each key divides its scores."""

    def __init__(self, unknown: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.unknown = unknown

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x * scale).chunk(3, -1))
        scores = q @ k.mT
        scores = scores / (k.sum(-1).unsqueeze(-2) if self.unknown else 4.0)
        return (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(50, 32), Attention()

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            return self.attention(self.embedding(tokens))
        return self.embedding(tokens)


class Sdpa(Attention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def sdpa() -> tuple[nn.Module, tuple[Tensor]]:
    return Sdpa(), (torch.randn(2, 24, 32),)


def model_only() -> nn.Module:
    return Attention()


def plain() -> tuple[nn.Module, tuple[Tensor]]:
    return Attention(), (torch.randn(2, 24, 32),)


def with_keywords() -> tuple[nn.Module, tuple[Tensor], dict[str, Any]]:
    return Attention(), (torch.randn(2, 24, 32),), {"scale": 0.5}


def function() -> tuple[Any, Tensor]:
    return lambda x: F.scaled_dot_product_attention(x, x, x), torch.randn(1, 2, 16, 8)


def refused() -> tuple[nn.Module, tuple[Tensor]]:
    return Attention(unknown=True), (torch.randn(2, 24, 32),)


def tokens() -> nn.Module:
    return Tokens()


def wrong_arguments() -> tuple[nn.Module, tuple[int]]:
    return Attention(), (3,)


def needs_something(x: int) -> nn.Module:
    return Attention()


def fails() -> nn.Module:
    raise RuntimeError("no weights here")


def returns_nothing() -> None:
    return None


NOT_CALLABLE = 3
