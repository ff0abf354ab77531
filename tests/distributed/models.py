"""A decoder in the style of Llama, written for one process, and how it is split over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import flash_inductor

DIM, HEAD_DIM, VOCABULARY = 32, 8, 24


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What people write, and the plugin replaces."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def explicit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The op by hand, which takes DTensors too."""
    return flash_inductor.attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """Grouped-query attention; the number of heads is what the projections give, all or a rank's share."""

    def __init__(self, kv_heads: int, attend: Any) -> None:
        super().__init__()
        self.attend = attend
        self.q_proj, self.o_proj = (nn.Linear(DIM, DIM, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(DIM, kv_heads * HEAD_DIM, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(2, (-1, HEAD_DIM)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(DIM, 2 * DIM, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, kv_heads: int, attend: Any) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention, self.mlp = Attention(kv_heads, attend), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Tokens [batch, length] to logits."""

    def __init__(self, layers: int = 1, kv_heads: int = 2, attend: Any = sdpa) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer(kv_heads, attend) for _ in range(layers))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def split(model: Decoder, mesh: Any, *, local: bool = True, sequence: bool = False) -> Decoder:
    """Tensor parallel over the heads; ``sequence``: norms on a share of the positions."""
    between = Shard(1) if sequence else Replicate()
    for layer in model.layers:
        columns = {"use_local_output": local}
        plan: dict[str, Any] = {
            "attention.q_proj": ColwiseParallel(**columns),
            "attention.k_proj": ColwiseParallel(**columns),
            "attention.v_proj": ColwiseParallel(**columns),
            "attention.o_proj": RowwiseParallel(output_layouts=between),
            "mlp.gate": ColwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=between),
        }
        if sequence:
            plan |= {
                "attention_norm": SequenceParallel(),
                "mlp_norm": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            }
        parallelize_module(layer, mesh, plan)
    if sequence:
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, plan)
    return model


def whole(x: Any) -> Tensor:
    """A DTensor's full tensor, or the tensor."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def tokens_of(batch: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and their successors."""
    row = torch.randint(VOCABULARY, (batch, length + 1), generator=torch.Generator().manual_seed(seed))
    return row[:, :-1], row[:, 1:]


def loss_of(logits: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(whole(logits).flatten(0, 1), targets.flatten())
