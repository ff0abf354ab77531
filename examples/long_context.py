"""Sliding-window attention over longer and longer sequences: what a window saves when it is understood.

    python examples/long_context.py
    python examples/long_context.py --lengths 4096 65536 --stock-until 4096

The layer is written as in a textbook: N x N scores, a window cut out of them.  Its cost grows with N squared; with the
plugin blocks outside the window are skipped, and it grows with N.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext

import torch
from common import DEVICE, DTYPE, WIDER, kept_for_backward
from torch import Tensor, nn

import flash_inductor


class WindowAttention(nn.Module):
    """x [1, length, dim]; a token sees itself and the ``window - 1`` tokens before it."""

    def __init__(self, dim: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        _, length, dim = x.shape
        q, k, v = (y.view(1, length, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        row, column = torch.arange(length, device=x.device)[:, None], torch.arange(length, device=x.device)[None]
        seen = (column <= row) & (column > row - self.window)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(1, length, dim))


def measure(layer: nn.Module, length: int, *, plugin: bool) -> tuple[float, float] | None:
    """Milliseconds of a forward and backward, and MiB kept between them; None if the memory doesn't suffice."""
    x = torch.randn(1, length, layer.out.in_features, device=DEVICE, dtype=DTYPE)
    torch._dynamo.reset()
    compiled = torch.compile(layer, dynamic=False) if plugin or DEVICE == "cuda" else layer
    times, kept = [], 0.0
    try:
        with flash_inductor.enabled() if plugin else nullcontext():
            for _ in range(4):
                start = time.perf_counter()
                loss = compiled(x).float().square().mean()
                kept = kept_for_backward(loss, layer)
                loss.backward()
                layer.zero_grad()
                if DEVICE == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
    except torch.OutOfMemoryError:
        return None
    return 1e3 * min(times[1:]), kept


def error(layer: nn.Module, length: int) -> float:
    """Of the compiled layer, relative to the same in a wider dtype."""
    x = torch.randn(1, length, layer.out.in_features, device=DEVICE, dtype=DTYPE)
    torch._dynamo.reset()
    with torch.no_grad(), flash_inductor.enabled():
        out = torch.compile(layer)(x).to(WIDER)
        expected = layer.to(WIDER)(x.to(WIDER))
    layer.to(DTYPE)
    return float((out - expected).norm() / expected.norm())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_cpu = DEVICE == "cpu"
    lengths = [512, 1024, 2048] if on_cpu else [2048, 4096, 8192, 16384, 32768, 65536]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--stock-until", type=int, default=2048 if on_cpu else 16384, help="no stock above this length")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    layer = (WindowAttention(128, 4, 128) if on_cpu else WindowAttention(1024, 8, 1024)).to(DEVICE, DTYPE)
    before = len(flash_inductor.report().sites)
    difference = error(layer, args.lengths[0])
    print(f"{DEVICE}, {str(DTYPE).removeprefix('torch.')}, window {layer.window}")
    print(f"{flash_inductor.report().sites[-1].describe()}; relative error {difference:.1e}\n")
    print(f"{'length':>8}{'stock ms':>12}{'plugin ms':>12}{'stock kept MiB':>17}{'plugin kept MiB':>17}")
    for length in args.lengths:
        stock = measure(layer, length, plugin=False) if length <= args.stock_until else None
        ours = measure(layer, length, plugin=True)
        cells = [f"{x[i]:.1f}" if x is not None else "-" for i in (0, 1) for x in (stock, ours)]
        print(f"{length:>8}{cells[0]:>12}{cells[1]:>12}{cells[2]:>17}{cells[3]:>17}")
    replaced = all(site.replaced for site in flash_inductor.report().sites[before:])
    return 0 if replaced and difference < 8 * torch.finfo(DTYPE).eps else 1


if __name__ == "__main__":
    sys.exit(main())
