"""Which kernel is the fastest for which problem: makes the rows of flash_inductor/kernels/choices.py on a GPU.

    python benchmarks/choices.py                        all cells (about 4 minutes on an H200)
    python benchmarks/choices.py --dims 64 --lengths 1024 4096 --kinds fwd

Prints TFLOP/s of every kernel that takes a cell, then rows for the cells in which the architecture's first kernel is
more than 2 % behind another: what runs of the same kernel differ by isn't worth a row.  B * N = 16384, H * D = 2048,
bf16, [B, N, H, D] memory, as models have it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from flash_inductor.bench.timing import GpuClock, interleave
from flash_inductor.kernels.choices import ORDER, Row
from flash_inductor.ops import attn, attn_backward, choice
from flash_inductor.spec import MaskSpec

CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "causal": ("causal", {"is_causal": True}),
    "window": ("window", {"is_causal": True, "window_left": 256}),
    "full softcap": ("full", {"softcap": 50.0}),
    "causal softcap": ("causal", {"is_causal": True, "softcap": 50.0}),
}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MARGIN = 1.02


def flops(kind: str, batch: int, heads: int, length: int, dim: int, options: dict[str, Any]) -> float:
    """Of the products over visible pairs."""
    left = min(options.get("window_left", length), length)
    pairs = length * length
    if options.get("is_causal"):
        pairs = length * (left + 1) - left * (left + 1) // 2 if left < length else length * (length + 1) // 2
    return (4.0 if kind == "fwd" else 10.0) * batch * heads * pairs * dim


def measure(kind: Any, length: int, dim: int, cell: str, clock: GpuClock, total_ms: float) -> dict[str, float]:
    """TFLOP/s of each kernel that takes the problem."""
    band, options = CELLS[cell]
    batch, heads = max(1, 16384 // length), 2048 // dim
    *qkv, grad_out = (
        torch.randn(batch, length, heads, dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in range(4)
    )
    mask = MaskSpec.from_window(options.get("is_causal", False), options.get("window_left"))
    band, square = choice.classify(mask, length, length, same_length=True)
    problem = choice.Problem(
        kind, choice.device_limits(0)[0], torch.bfloat16, dim, dim, (length, length), band, square,
        softcap="softcap" in options,
    )  # fmt: skip
    out, lse = attn(*qkv, **options, kernel_name="triton")
    calls: dict[str, Callable[[], Any]] = {}
    for name in choice.eligible(problem):
        if kind == "fwd":
            call = partial(attn, *qkv, **options, kernel_name=name)
        else:
            call = partial(attn_backward, grad_out, None, *qkv, out, lse, **options, kernel_name=name)
        try:
            call()
        except Exception as error:
            print(f"# {name} fails: {type(error).__name__}: {error}", flush=True)
            continue
        calls[name] = call
    with torch.no_grad():
        times = interleave(calls, clock, 3, total_ms)
    work = flops(kind, batch, heads, length, dim, options)
    return {name: work / statistics.median(ms) / 1e9 for name, ms in times.items()}


def rows_of(found: dict[tuple[str, int, str], dict[int, dict[str, float]]], architecture: int) -> list[Row]:
    """Rows for cells in which the first kernel of the order is behind; neighbouring lengths share one."""
    rows: list[Row] = []
    for (kind, dim, cell), by_length in found.items():
        lengths = sorted(by_length)
        previous: tuple[str, ...] | None = None
        for i, length in enumerate(lengths):
            speeds = by_length[length]
            default = next((k for k in (*ORDER.get(architecture, ()), "triton") if k in speeds), "triton")
            ranked = tuple(sorted(speeds, key=lambda name: -speeds[name]))
            best = ranked[: ranked.index(default) + 1]
            if not speeds or speeds[ranked[0]] <= MARGIN * speeds[default]:
                previous = None
                continue
            low = 1 if i == 0 else (lengths[i - 1] + length) // 2 + 1
            high = (length + lengths[i + 1]) // 2 if i + 1 < len(lengths) else 1 << 31
            band: Any = CELLS[cell][0]
            if previous == best:
                rows[-1] = rows[-1]._replace(lengths=(rows[-1].lengths[0], high))
            else:
                rows.append(Row(kind, dim, band, (low, high), best, "softcap" in cell))  # type: ignore[arg-type]
            previous = best
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--kinds", nargs="+", default=["fwd", "bwd"], choices=["fwd", "bwd"])
    parser.add_argument("--ms", type=float, default=60.0, help="time to measure each kernel of each cell for")
    args = parser.parse_args(argv)
    clock = GpuClock()
    found: dict[tuple[str, int, str], dict[int, dict[str, float]]] = {}
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    for kind in args.kinds:
        for dim in args.dims:
            for cell in args.cells:
                for length in args.lengths:
                    speeds = measure(kind, length, dim, cell, clock, args.ms)
                    found.setdefault((kind, dim, cell), {})[length] = speeds
                    words = "  ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
                    print(f"{kind} D{dim:<3} {cell:14} N {length:<6} {words}", flush=True)
    for row in rows_of(found, choice.device_limits(0)[0] // 10):
        print(f"        {row},")


if __name__ == "__main__":
    main()
