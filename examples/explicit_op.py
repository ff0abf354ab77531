"""Call the op by hand: packed documents, a sliding window and grouped heads, in eager code.

    python examples/explicit_op.py

Documents of different lengths lie one after another in one sequence, and no token sees another document.  Compared with
each document on its own, in float64, and with SDPA, which needs the mask as a tensor and the keys repeated.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import DEVICE, DTYPE
from torch import Tensor

import flash_inductor
from flash_inductor import AttentionSpec, MaskSpec
from flash_inductor.reference import attention_forward


def packed(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, window: int) -> Tensor:
    """``documents`` [1, length] numbers each token's document; a query sees itself and ``window - 1`` tokens before."""
    return flash_inductor.attention(
        q, k, v, is_causal=True, window_size=(window - 1, 0), query_segments=documents, key_segments=documents
    )


def with_sdpa(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, window: int) -> Tensor:
    row, column = (torch.arange(q.shape[2], device=q.device).view(shape) for shape in ((-1, 1), (1, -1)))
    seen = (column <= row) & (column > row - window) & (documents.mT == documents)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def milliseconds(function: Callable[..., Tensor], inputs: list[Tensor], *args: object) -> float:
    """The best of five forwards and backwards."""
    times = []
    for _ in range(6):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        torch.autograd.grad(function(*inputs, *args).sum(), inputs)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times[1:])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, default=1 if DEVICE == "cpu" else 8, help="documents this much longer")
    scale = parser.parse_args(argv).scale
    lengths = [scale * n for n in (700, 60, 330, 410, 548)]
    heads, kv_heads, dim, window = (8, 2, 64, 256 * scale)
    torch.manual_seed(0)
    sizes = [(1, n, sum(lengths), dim) for n in (heads, kv_heads, kv_heads)]
    inputs = [torch.randn(size, device=DEVICE, dtype=DTYPE, requires_grad=True) for size in sizes]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(DEVICE)

    spec = AttentionSpec(mask=MaskSpec.from_window(is_causal=True, window_left=window - 1))
    alone = [x.detach().double().split(lengths, dim=2) for x in inputs]
    expected = torch.cat([attention_forward(*document, spec)[0] for document in zip(*alone, strict=True)], dim=2)
    errors = {}
    print(f"{DEVICE}, {str(DTYPE).removeprefix('torch.')}: documents of {lengths} tokens, window {window}")
    for name, function in (("flash_inductor", packed), ("SDPA with a mask", with_sdpa)):
        out = function(*inputs, documents, window)
        errors[name] = float((out.detach().double() - expected).norm() / expected.norm())
        ms = milliseconds(function, inputs, documents, window)
        print(f"  {name:18} relative error {errors[name]:.1e}, forward and backward {ms:.1f} ms")
    equal = errors["flash_inductor"] <= 2 * max(errors["SDPA with a mask"], torch.finfo(DTYPE).eps)
    print("equal to each document on its own within rounding" if equal else "DIFFERENT")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
