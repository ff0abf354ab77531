"""What the examples share: train a model three times, with stock PyTorch and with the plugin, and compare.

    reference   eager, in a wider dtype: what the losses would be without rounding
    stock       torch.compile as it is (or eager, with --stock eager)
    plugin      torch.compile with flash_inductor.enabled()

All three start from the same weights and see the same batches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import flash_inductor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE, WIDER = (torch.bfloat16, torch.float32) if DEVICE == "cuda" else (torch.float32, torch.float64)
# How much farther from the reference than stock the plugin may be: both roundings are random, and the largest of a few
# steps' differences varies by a small factor.
ROUNDING = 8.0


@dataclass
class Run:
    """One training: the loss of each step, seconds a step without the first two, and MiB kept for the backward."""

    losses: list[float]
    seconds: float
    kept: float
    peak: float | None  # MiB, CUDA only


def arguments(description: str | None, steps: int) -> argparse.ArgumentParser:
    """The options that every example has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps, help=f"training steps (default: {steps})")
    default = "compile" if DEVICE == "cuda" else "eager"  # on a CPU compiling twice takes more than a minute
    parser.add_argument("--stock", choices=("compile", "eager"), default=default, help=f"to compare with ({default})")
    return parser


def kept_for_backward(loss: Tensor, model: nn.Module) -> float:
    """MiB of the tensors that the autograd graph of ``loss`` holds, parameters not counted."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}
    pending, seen = [loss.grad_fn], set()
    while pending:
        node: Any = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [function for function, _ in node.next_functions]
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        for x in [*saved, *getattr(node, "saved_tensors", ())]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in own:
                sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(sizes.values()) / 2**20


def train(
    model: nn.Module, step: Callable[..., Tensor], batches: Sequence[tuple[Tensor, ...]], learning_rate: float
) -> Run:
    """Train ``model`` by ``step(*batch)``, which returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    losses, seconds, kept = [], [], 0.0
    for i, batch in enumerate(batches):
        if i == 2 and DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = step(*batch)
        if i == 0:
            kept = kept_for_backward(loss, model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**20 if DEVICE == "cuda" else None
    return Run(losses, statistics.median(seconds[2:] or seconds), kept, peak)


def compare(
    make: Callable[[], nn.Module],
    batches: Sequence[tuple[Tensor, ...]],
    *,
    stock: str = "compile",
    learning_rate: float = 1e-3,
) -> bool:
    """Train what ``make()`` returns (a module whose call returns the loss) three times, and print a comparison.

    Batches are tensors on DEVICE; floating-point ones are cast to the dtype of the run.  True if sites were replaced
    and the losses are as close to the reference as stock's.
    """
    torch.manual_seed(0)
    initial = make().state_dict()

    def run(dtype: torch.dtype, compiled: bool, plugin: bool) -> Run:
        torch._dynamo.reset()
        model = make()
        model.load_state_dict(initial)
        model = model.to(DEVICE, dtype)
        cast = [tuple(x.to(dtype) if x.is_floating_point() else x for x in batch) for batch in batches]
        with flash_inductor.enabled() if plugin else nullcontext():
            return train(model, torch.compile(model) if compiled else model, cast, learning_rate)

    reference = run(WIDER, compiled=False, plugin=False)
    theirs = run(DTYPE, compiled=stock == "compile", plugin=False)
    before = len(flash_inductor.report().sites)
    ours = run(DTYPE, compiled=True, plugin=True)
    sites = flash_inductor.report().sites[before:]
    replaced = sum(site.replaced for site in sites)
    print(f"{DEVICE}, {str(DTYPE).removeprefix('torch.')}: {replaced} of {len(sites)} attention sites replaced")
    for site in sites:
        print(f"  {site.describe()}")
    print_table(stock, reference, theirs, ours)
    distance = [max(abs(a - b) for a, b in zip(x.losses, reference.losses, strict=True)) for x in (theirs, ours)]
    unit = torch.finfo(DTYPE).eps * max(reference.losses)
    equal = distance[1] <= ROUNDING * max(distance[0], unit)
    print(
        f"largest distance from the {str(WIDER).removeprefix('torch.')} losses: stock {distance[0]:.1e}, plugin "
        f"{distance[1]:.1e}: {'equal' if equal else 'DIFFERENT'} within rounding"
    )
    return bool(replaced and equal)


def print_table(stock: str, reference: Run, theirs: Run, ours: Run) -> None:
    print(f"\n{'':26}{'reference':>12}{'stock ' + stock:>16}{'plugin':>12}")
    steps = len(ours.losses)
    for i in sorted({round(k * (steps - 1) / 4) for k in range(5)}):
        a, b, c = (run.losses[i] for run in (reference, theirs, ours))
        print(f"{f'loss, step {i}':26}{a:12.5f}{b:16.5f}{c:12.5f}")
    print(f"{'a step, ms':26}{'':12}{1e3 * theirs.seconds:16.1f}{1e3 * ours.seconds:12.1f}")
    print(f"{'kept for backward, MiB':26}{'':12}{theirs.kept:16.1f}{ours.kept:12.1f}")
    if ours.peak is not None:
        print(f"{'peak memory, MiB':26}{'':12}{theirs.peak:16.1f}{ours.peak:12.1f}")
    print()
