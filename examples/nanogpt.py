"""Train a small GPT on bytes, written in the style of nanoGPT: attention by hand, the causal mask in a buffer.

    python examples/nanogpt.py
    python examples/nanogpt.py --text FILE --steps 50

Only the line torch.compile(model) and flash_inductor.enabled() (both in common.py) have to do with the plugin.  The
buffer is recognised as a causal mask; the compiled code checks that it stays one.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from common import DEVICE, arguments, compare
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    layers: int = 2
    heads: int = 4
    dim: int = 128
    length: int = 512
    batch: int = 1


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv = nn.Linear(c.dim, 3 * c.dim)
        self.out = nn.Linear(c.dim, c.dim)
        self.register_buffer("visible", torch.ones(c.length, c.length, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = (y.view(batch, length, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(dim, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(~self.visible[:length, :length], float("-inf"))
        return self.out((F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(c.dim) for _ in range(2))
        self.attention = Attention(c)
        self.mlp = nn.Sequential(nn.Linear(c.dim, 4 * c.dim), nn.GELU(), nn.Linear(4 * c.dim, c.dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Bytes [batch, length] and the bytes that follow them, to the mean cross entropy."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, c.dim), nn.Embedding(c.length, c.dim)
        self.blocks = nn.Sequential(*(Block(c) for _ in range(c.layers)))
        self.norm, self.head = nn.LayerNorm(c.dim), nn.Linear(c.dim, 256, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def text_bytes(path: str | None) -> Tensor:
    """A file, or the language reference that every Python ships."""
    if path is None:
        from pydoc_data.topics import topics

        data = "\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        data = Path(path).read_bytes()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__, steps=20)
    parser.add_argument("--text", metavar="FILE", help="what to train on (default: Python's language reference)")
    args = parser.parse_args(argv)
    c = Config() if DEVICE == "cpu" else Config(layers=6, heads=12, dim=768, length=2048, batch=2)
    text = text_bytes(args.text)
    if len(text) <= c.length:
        parser.error(f"--text: expected a file of more than {c.length} bytes, got {len(text)}")
    starts = torch.randint(len(text) - c.length, (args.steps, c.batch), generator=torch.Generator().manual_seed(0))
    pieces = [torch.stack([text[s : s + c.length + 1] for s in row]).long().to(DEVICE) for row in starts.tolist()]
    return 0 if compare(lambda: GPT(c), [(p[:, :-1], p[:, 1:]) for p in pieces], stock=args.stock) else 1


if __name__ == "__main__":
    sys.exit(main())
