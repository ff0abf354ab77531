"""Training steps of real model families: stock torch.compile with each attention implementation, and with the plugin.

    python benchmarks/e2e.py --out results.json                  one GPU, bf16, all families
    python benchmarks/e2e.py --families gemma2 --impls eager,ours-eager
    python benchmarks/e2e.py --device cpu --tiny                 the same code with toy sizes

Models are Hugging Face's at random weights.  A step is forward, loss and backward, without the optimizer.  Before the
timed steps a few steps with plain SGD give the losses that are compared.  "ours-X" is the model with implementation X
under plain ``torch.compile`` with ``flash_inductor.enabled()``.  A cell that fails says so and the others go on.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")  # first-step times must compile; sites must be seen

import torch
import transformers

import flash_inductor
from flash_inductor.report import collect

STOCK = ("sdpa", "eager", "flex_attention")
IMPLS = (*STOCK, "ours-sdpa", "ours-eager")
# Relative distance of losses and gradient norms that rounding explains, where stock's own spread isn't larger.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-18}


@dataclass(frozen=True)
class Family:
    """A model family: class names in transformers, the config's arguments, and the training shape."""

    model: str
    config: str
    arguments: dict[str, Any]
    tiny: dict[str, Any]
    batch: int
    length: int


_ROPE = {"num_hidden_layers": 2, "vocab_size": 32000}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
_7B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
_2B = {"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4}
_GPT2 = {"n_positions": 4096, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
FAMILIES = {
    "llama3-8b": Family("LlamaForCausalLM", "LlamaConfig", {**_ROPE, **_7B}, _TINY, batch=2, length=4096),
    "mistral-7b": Family(
        "MistralForCausalLM",
        "MistralConfig",
        {**_ROPE, **_7B, "sliding_window": 1024},
        {**_TINY, "sliding_window": 16},
        batch=1,
        length=8192,
    ),
    "gemma2-2b": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_ROPE, **_2B, "head_dim": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0},
        {**_TINY, "head_dim": 16, "sliding_window": 16},
        batch=1,
        length=8192,
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {**_GPT2, "n_layer": 4},
        {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256},
        batch=4,
        length=4096,
    ),
}


@dataclass
class Cell:
    """What one family with one implementation did; ``error`` is set if it failed."""

    family: str
    impl: str
    layers: int = 0
    replaced: int = 0
    left_alone: list[str] = field(default_factory=list)
    first_step_s: float = 0.0
    step_ms: float = 0.0
    peak_gib: float | None = None
    losses: list[float] = field(default_factory=list)
    gradient_norm: float = 0.0
    loss_difference: float | None = None  # relative to the first stock implementation that ran
    gradient_difference: float | None = None
    within_rounding: bool | None = None
    error: str | None = None


def build(family: Family, implementation: str, args: argparse.Namespace) -> tuple[torch.nn.Module, torch.Tensor, int]:
    """The model, its tokens [batch, length], and its number of layers; the same ones for each implementation."""
    arguments = {**family.arguments, **(family.tiny if args.tiny else {})}
    config = getattr(transformers, family.config)(**arguments)
    config._attn_implementation = implementation
    config.use_cache = False
    torch.manual_seed(args.seed)
    model = getattr(transformers, family.model)(config).to(args.device, args.dtype).train()
    batch, length = (2, 64) if args.tiny else (family.batch, family.length)
    tokens = torch.randint(0, config.vocab_size, (batch, length)).to(args.device)
    return model, tokens, config.num_hidden_layers


def learn(step: Callable[[], torch.Tensor], model: torch.nn.Module, cell: Cell, args: argparse.Namespace) -> None:
    """A few SGD steps on one batch: the losses to compare, and the norm of the first gradient.  The first compiles."""
    begin = time.perf_counter()
    for i in range(args.loss_steps):
        loss = step().item()
        if i == 0:
            cell.first_step_s = time.perf_counter() - begin
            squares = [p.grad.float().square().sum() for p in model.parameters() if p.grad is not None]
            cell.gradient_norm = torch.stack(squares).sum().sqrt().item()
        cell.losses.append(loss)
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= args.learning_rate * p.grad
                p.grad = None


def time_step(step: Callable[[], Any], cuda: bool) -> float:
    """Milliseconds of one call."""
    if not cuda:
        begin = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - begin)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def measure(name: str, impl: str, args: argparse.Namespace) -> Cell:
    ours, implementation = impl.startswith("ours-"), impl.removeprefix("ours-")
    cell = Cell(name, impl)
    model, tokens, cell.layers = build(FAMILIES[name], implementation, args)
    cuda = args.device == "cuda"
    with flash_inductor.enabled() if ours else nullcontext(), collect() as sites:
        compiled = torch.compile(model, dynamic=False)

        def step() -> torch.Tensor:
            loss = compiled(input_ids=tokens, labels=tokens).loss
            loss.backward()
            return loss.detach()

        def bare_step() -> None:
            step()
            model.zero_grad(set_to_none=True)

        learn(step, model, cell, args)
        for _ in range(args.warmup):
            bare_step()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        cell.step_ms = statistics.median(time_step(bare_step, cuda) for _ in range(args.repeat))
    if cuda:
        cell.peak_gib = torch.cuda.max_memory_allocated() / 2**30
    cell.replaced = sum(site.replaced for site in sites)
    cell.left_alone = [site.reason or site.node for site in sites if not site.replaced]
    return cell


def guarded(name: str, impl: str, args: argparse.Namespace) -> Cell:
    """``measure``, with a failure as a cell; leaves no compiled code and no memory to the next cell."""
    try:
        cell = measure(name, impl, args)
    except Exception as error:
        first_line = str(error).strip().splitlines()[:1]
        cell = Cell(name, impl, error=f"{type(error).__name__}: {''.join(first_line)[:150]}")
    torch._dynamo.reset()
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return cell


def compare(cells: list[Cell], rounding: float) -> None:
    """Fill in, for the cells of one family, how far losses and gradient norm are from the first stock one's.

    Allowed is what rounding explains: ``rounding``, or twice the spread of the stock implementations if that's more.
    """
    ran = [cell for cell in cells if cell.error is None]
    stock = [cell for cell in ran if cell.impl in STOCK]
    if not stock:
        return
    base = stock[0]
    for cell in ran:
        differences = [abs(a - b) / abs(b) for a, b in zip(cell.losses, base.losses, strict=True)]
        cell.loss_difference = math.nan if any(map(math.isnan, differences)) else max(differences)
        cell.gradient_difference = abs(cell.gradient_norm - base.gradient_norm) / base.gradient_norm
    loss_bound = max([rounding, *(2 * (c.loss_difference or 0.0) for c in stock)])
    gradient_bound = max([rounding, *(2 * (c.gradient_difference or 0.0) for c in stock)])
    for cell in ran:
        if cell.loss_difference is not None and cell.gradient_difference is not None:
            cell.within_rounding = cell.loss_difference <= loss_bound and cell.gradient_difference <= gradient_bound


HEADER = ("family", "impl", "step ms", "peak GiB", "first s", "loss diff", "grad diff", "rounding", "replaced")


def row(cell: Cell) -> str:
    if cell.error is not None:
        return f"{cell.family:12} {cell.impl:15} failed: {cell.error}"
    peak = "-" if cell.peak_gib is None else f"{cell.peak_gib:.2f}"
    loss = "-" if cell.loss_difference is None else f"{cell.loss_difference:.1e}"
    gradient = "-" if cell.gradient_difference is None else f"{cell.gradient_difference:.1e}"
    verdict = {None: "-", True: "equal", False: "DIFFERENT"}[cell.within_rounding]
    replaced = f"{cell.replaced}/{cell.layers}" if cell.impl.startswith("ours-") else "-"
    return (
        f"{cell.family:12} {cell.impl:15} {cell.step_ms:9.2f} {peak:>9} {cell.first_step_s:9.1f} "
        f"{loss:>9} {gradient:>9} {verdict:>9} {replaced:>9}"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--impls", default=",".join(IMPLS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the script")
    parser.add_argument("--repeat", type=int, default=10, metavar="N", help="timed steps; their median is reported")
    parser.add_argument("--warmup", type=int, default=3, metavar="N", help="untimed steps before them")
    parser.add_argument("--loss-steps", type=int, default=4, metavar="N", help="SGD steps whose losses are compared")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write everything there as JSON")
    args = parser.parse_args(argv)
    args.families, args.impls = args.families.split(","), args.impls.split(",")
    for option, values, known in (("families", args.families, FAMILIES), ("impls", args.impls, IMPLS)):
        if unknown := [v for v in values if v not in known]:
            parser.error(f"--{option}: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    args.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_float32_matmul_precision("high")
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    command = " ".join(["python", "benchmarks/e2e.py", *(sys.argv[1:] if argv is None else argv)])
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "device": device}
    print(command, *(f"{k} {v}" for k, v in versions.items()), sep="\n", flush=True)

    cells: list[Cell] = []
    for name in args.families:
        group: list[Cell] = []
        for impl in args.impls:
            group.append(guarded(name, impl, args))
            compare(group, ROUNDING[args.dtype])
            print(f"# {row(group[-1])}", flush=True)
            if args.out is not None:  # after each cell: an interrupted run keeps what it measured
                data = {"command": command, **versions, "cells": [asdict(cell) for cell in (*cells, *group)]}
                args.out.write_text(json.dumps(data, indent=1) + "\n")
        cells += group

    print("\n" + "{:12} {:15} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}".format(*HEADER))
    print("\n".join(row(cell) for cell in cells))
    for cell in cells:
        if cell.impl.startswith("ours-") and cell.left_alone:
            print(f"{cell.family} {cell.impl} left alone: {'; '.join(sorted(set(cell.left_alone)))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
