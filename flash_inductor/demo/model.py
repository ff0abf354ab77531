"""A small Gemma-2-style language model, written as a user would write it: nothing here knows of the plugin.

Grouped-query attention with capped logits, layers that alternate between a sliding window and full causal
attention, rotary positions, RMSNorm before and after each block, GeGLU, capped output logits, tied embeddings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes.  ``window``: a query sees itself and the ``window - 1`` tokens before it, in every other layer."""

    vocab: int = 256
    dim: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 384
    window: int = 128
    attention_cap: float = 50.0
    logit_cap: float = 30.0


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1.0 + self.weight.float())).to(x.dtype)


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of x [batch, heads, tokens, head_dim], in fp32."""
    tokens, dim = x.shape[-2:]
    frequency = 10000.0 ** (-torch.arange(0, dim, 2, device=x.device, dtype=torch.float32) / dim)
    angle = torch.arange(tokens, device=x.device, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, window: int | None) -> None:
        super().__init__()
        self.config, self.window = config, window
        self.q_proj = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        c = self.config
        batch, tokens, _ = x.shape
        q = self.q_proj(x).view(batch, tokens, c.heads, c.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, tokens, c.kv_heads, c.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, c.kv_heads, c.head_dim).transpose(1, 2)
        q, k = rotate(q), rotate(k)
        k = k.repeat_interleave(c.heads // c.kv_heads, dim=1)
        v = v.repeat_interleave(c.heads // c.kv_heads, dim=1)

        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(c.head_dim)
        scores = c.attention_cap * torch.tanh(scores / c.attention_cap)
        row = torch.arange(tokens, device=x.device)[:, None]
        column = torch.arange(tokens, device=x.device)[None, :]
        visible = column <= row
        if self.window is not None:
            visible = visible & (column > row - self.window)
        scores = scores.masked_fill(~visible, float("-inf"))
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        out = torch.matmul(weights, v)

        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, window: int | None) -> None:
        super().__init__()
        self.attention = Attention(config, window)
        self.feed_forward = FeedForward(config)
        self.norms = nn.ModuleList(RMSNorm(config.dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norms[1](self.attention(self.norms[0](x)))
        return x + self.norms[3](self.feed_forward(self.norms[2](x)))


class LanguageModel(nn.Module):
    """Tokens [batch, length] and the tokens that follow them, to the mean cross entropy (a scalar, fp32)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        windows = (config.window if i % 2 == 0 else None for i in range(config.layers))
        self.blocks = nn.ModuleList(Block(config, window) for window in windows)
        self.norm = RMSNorm(config.dim)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) * math.sqrt(self.config.dim)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight).float()
        logits = self.config.logit_cap * torch.tanh(logits / self.config.logit_cap)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
