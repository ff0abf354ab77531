"""Train a vision transformer made of torch.nn.TransformerEncoder: attention that hides inside a module of PyTorch.

    python examples/vit.py

The images are noise with one bright square; the label says in which quadrant it lies.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from common import DEVICE, arguments, compare
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    layers: int = 1
    heads: int = 4
    dim: int = 128
    image: int = 64
    patch: int = 4
    batch: int = 2


class ViT(nn.Module):
    """Images [batch, 3, size, size] and labels to the mean cross entropy."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, c.dim, c.patch, c.patch)
        self.label = nn.Parameter(torch.zeros(1, 1, c.dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (c.image // c.patch) ** 2, c.dim))
        layer = nn.TransformerEncoderLayer(
            c.dim, c.heads, 4 * c.dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, c.layers, nn.LayerNorm(c.dim), enable_nested_tensor=False)
        self.head = nn.Linear(c.dim, 4)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.label.expand(len(x), -1, -1), x], dim=1) + self.positions
        return F.cross_entropy(self.head(self.encoder(x)[:, 0]).float(), labels)


def batches(c: Config, steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found, half = [], c.image // 2
    for _ in range(steps):
        images = torch.randn(c.batch, 3, c.image, c.image, generator=generator)
        labels = torch.randint(4, (c.batch,), generator=generator)
        for image, label in zip(images, labels.tolist(), strict=True):
            row, column = (half * part for part in divmod(label, 2))
            image[:, row + half // 4 : row + half // 2, column + half // 4 : column + half // 2] += 3
        found.append((images.to(DEVICE), labels.to(DEVICE)))
    return found


def main(argv: list[str] | None = None) -> int:
    args = arguments(__doc__, steps=10).parse_args(argv)
    c = Config() if DEVICE == "cpu" else Config(layers=12, heads=12, dim=768, image=384, patch=8, batch=8)
    return 0 if compare(lambda: ViT(c), batches(c, args.steps), stock=args.stock) else 1


if __name__ == "__main__":
    sys.exit(main())
