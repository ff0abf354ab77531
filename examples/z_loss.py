"""A z-loss on attention: keep the log-sum-exp of the scores small while training, through the op's second output.

    python examples/z_loss.py

Large attention logits make training unstable; a penalty on log(Z)^2 bounds them.  Written out it needs the scores.
Here the log-sum-exp comes out of the kernel, and its gradient goes back into it.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
from common import DEVICE
from torch import Tensor, nn

import flash_inductor


class Attention(nn.Module):
    """x [batch, length, dim] to the output and the log-sum-exp [batch, heads, length] of each query."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out, lse = flash_inductor.attention(q, k, v, is_causal=True, return_lse=True)
        return self.out(out.transpose(1, 2).reshape(batch, length, dim)), lse


def train(weight: float, steps: int, length: int) -> tuple[list[float], float]:
    """Recall the token eight places before, with a z-loss of this weight: the losses, and the final mean log(Z)^2."""
    torch.manual_seed(0)
    dim, vocab = 64, 32
    embed, position = nn.Embedding(vocab, dim).to(DEVICE), nn.Embedding(length, dim).to(DEVICE)
    attention, head = Attention(dim, heads=4).to(DEVICE), nn.Linear(dim, vocab).to(DEVICE)
    modules = nn.ModuleList([embed, position, attention, head])
    optimizer = torch.optim.AdamW(modules.parameters(), lr=5e-3)
    losses, z = [], torch.zeros(())
    for _ in range(steps):
        tokens = torch.randint(vocab, (4, length), device=DEVICE)
        out, lse = attention(embed(tokens) + position.weight)
        loss = F.cross_entropy(head(out)[:, 8:].flatten(0, 1), tokens[:, :-8].flatten())
        z = lse.square().mean()
        (loss + weight * z).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, z.item()


def gradient_error() -> float:
    """Of the gradients of a z-loss alone: the op's against the formula written out, in float64."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 64, 32, dtype=torch.float64, requires_grad=True) for _ in range(3))
    _, lse = flash_inductor.attention(q, k, v, is_causal=True, return_lse=True)
    ours = torch.autograd.grad(lse.square().mean(), (q, k))
    hidden = torch.ones(64, 64, dtype=torch.bool).triu(1)
    scores = (q @ k.mT / 32**0.5).masked_fill(hidden, float("-inf"))
    expected = torch.autograd.grad(scores.logsumexp(-1).square().mean(), (q, k))
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, expected, strict=True))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="training steps (default: 150)")
    steps = parser.parse_args(argv).steps
    error = gradient_error()
    print(f"gradient of the z-loss, relative error against the formula in float64: {error:.1e}")
    print(f"\n{DEVICE}, {steps} steps{'first loss':>16}{'last loss':>12}{'mean log(Z)^2':>16}")
    results = {weight: train(weight, steps, 128 if DEVICE == "cpu" else 2048) for weight in (0.0, 1e-2)}
    for weight, (losses, z) in results.items():
        print(f"{f'z-loss weight {weight:g}':20}{losses[0]:12.3f}{losses[-1]:12.3f}{z:16.2f}")
    return 0 if error < 1e-12 and results[1e-2][1] < results[0.0][1] else 1


if __name__ == "__main__":
    sys.exit(main())
