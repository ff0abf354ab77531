"""Thousands of training steps with changing lengths: flat memory, no recompiles, the loss that stock gives.

    python benchmarks/soak.py --out soak.json            2,000 steps on one GPU
    python benchmarks/soak.py --device cpu --steps 30    the same code with a small model; compilation takes minutes

A small causal language model (the demo's: grouped heads, layers that alternate between a sliding window and full causal
attention, capped logits) is trained on English text, every step with another length, compiled once with the length
marked dynamic.  Three runs (on a GPU at once), each in a process of its own, from the same seeds: "plugin"; "stock",
without the package; and "noise", stock from parameters that are changed by about one rounding, which shows how far two
runs of the same arithmetic drift apart.

It fails, with exit code 1, if memory grows from a tenth of the steps to the end (allocated by 1 %, reserved by 5 %, on
a CPU the resident set by 5 %), if anything compiles after the first steps or more often than in stock, if a site isn't
replaced, or if the mean losses of windows of steps differ from stock's by more than the noise does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package beside this folder, installed or not

import torch

import flash_inductor
from flash_inductor.demo.model import LanguageModel, ModelConfig
from flash_inductor.demo.settings import load_text

VARIANTS = ("stock", "plugin", "noise")
WINDOWS = 10  # of steps, whose mean losses are compared
MOST_NOISE = 3.0  # times the largest difference between "noise" and "stock"
MOST_GROWTH = {"allocated": 1.01, "reserved": 1.05, "resident": 1.05}
GPU = ModelConfig(dim=512, layers=2, heads=8, kv_heads=2, head_dim=64, hidden=1536, window=128)
CPU = ModelConfig(dim=64, layers=2, heads=4, kv_heads=2, head_dim=16, hidden=128, window=24)

# Scalar code compiles in a fraction of the time, which is nearly all that a run on a CPU takes.
QUICK_CPU: dict[str, Any] = {"cpp.simdlen": 1}


class Memory:
    """Bytes in use: CUDA's allocator, or on a CPU this process's resident set."""

    def __init__(self, device: str) -> None:
        self.cuda = device != "cpu"

    def now(self) -> dict[str, int]:
        if self.cuda:
            torch.cuda.synchronize()
            return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"resident": pages * 4096}


def lengths(args: argparse.Namespace) -> list[int]:
    """Of every step; the longest comes first, so that what comes later fits what is reserved."""
    generator = torch.Generator().manual_seed(args.seed)
    shortest, longest = args.length // 8, args.length
    return [longest, *torch.randint(shortest, longest + 1, (args.steps - 1,), generator=generator).tolist()]


def make_model(variant: str, args: argparse.Namespace) -> LanguageModel:
    config = replace(CPU if args.device == "cpu" else GPU, attention_cap=args.softcap)
    torch.manual_seed(args.seed)
    model = LanguageModel(config).to(args.device)
    if variant == "noise":
        with torch.no_grad():
            for p in model.parameters():
                p *= 1 + torch.finfo(dtype_of(args)).eps / 2 * torch.randn_like(p)
    return model


def dtype_of(args: argparse.Namespace) -> torch.dtype:
    return torch.float32 if args.device == "cpu" else torch.bfloat16


def compiles() -> int:
    """How many graphs Dynamo has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def train(variant: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run, in this process."""
    text = torch.frombuffer(bytearray(load_text(None)), dtype=torch.uint8).to(args.device)
    model, memory = make_model(variant, args), Memory(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, fused=args.device == "cuda")
    generator = torch.Generator().manual_seed(args.seed)
    losses = torch.zeros(args.steps, device=args.device)
    marks = {max(3, args.steps // 10), args.steps}
    found: dict[str, Any] = {"variant": variant, "memory": {}, "graphs": {}}
    span = torch.arange(args.length + 1, device=args.device)
    begin = time.perf_counter()
    with flash_inductor.enabled() if variant == "plugin" else nullcontext():
        compiled = torch.compile(model, options=QUICK_CPU if args.device == "cpu" else None)
        for step, length in enumerate(lengths(args), 1):
            starts = torch.randint(len(text) - length, (args.batch, 1), generator=generator).to(args.device)
            piece = text[starts + span[: length + 1]].long()
            tokens, targets = piece[:, :-1].contiguous(), piece[:, 1:].contiguous()
            for x in (tokens, targets):
                torch._dynamo.mark_dynamic(x, 1)  # an error if anything needs one length
            with torch.autocast(args.device, dtype_of(args), enabled=args.device == "cuda"):
                loss = compiled(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step - 1] = loss.detach()
            del loss, piece, starts, tokens, targets, x
            if step == 1:
                found["first_step_s"] = time.perf_counter() - begin
            if step in marks:
                found["memory"][step] = memory.now()
                found["graphs"][step] = compiles()
    found["seconds"] = time.perf_counter() - begin
    found["losses"] = losses.tolist()
    found["sites"] = [site.replaced for site in flash_inductor.report().sites]
    return found


def window_means(losses: Sequence[float]) -> list[float]:
    size = max(1, len(losses) // WINDOWS)
    return [sum(losses[i : i + size]) / len(losses[i : i + size]) for i in range(0, len(losses), size)]


def judge(runs: dict[str, dict[str, Any]], layers: int) -> tuple[dict[str, Any], list[str]]:
    """A summary, and what is wrong."""
    plugin, stock = runs["plugin"], runs["stock"]
    problems = []
    (early, late) = plugin["memory"].values()
    growth = {name: late[name] / early[name] for name in late}
    for name in late:
        if growth[name] > MOST_GROWTH[name]:
            problems.append(f"{name} memory grew by {growth[name] - 1:.1%}: {early[name]} to {late[name]} bytes")
    first, last = plugin["graphs"].values()
    if last > first:
        problems.append(f"{last - first} graphs were compiled after the first steps")
    if last > max(stock["graphs"].values()):
        problems.append(f"{last} graphs were compiled, {max(stock['graphs'].values())} by stock")
    if plugin["sites"] != [True] * len(plugin["sites"]) or len(plugin["sites"]) < layers:
        problems.append(f"sites: expected {layers} replaced, got {plugin['sites']}")
    if stock["sites"]:
        problems.append("stock had sites replaced")
    means = {name: window_means(run["losses"]) for name, run in runs.items()}
    distance = {
        name: max(abs(a - b) for a, b in zip(means[name], means["stock"], strict=True)) for name in ("plugin", "noise")
    }
    # Where the losses are equal to float32's digits, there is no noise to compare with.
    allowed = MOST_NOISE * max(distance["noise"], 1e-5 * means["stock"][0])
    if not distance["plugin"] <= allowed:
        problems.append(f"losses differ from stock's by {distance['plugin']:.2e}, noise allows {allowed:.2e}")
    if not means["plugin"][-1] < means["plugin"][0]:
        problems.append("the model has learned nothing, so that its losses show nothing")
    summary = {
        "growth": growth,
        "graphs": {name: run["graphs"] for name, run in runs.items()},
        "loss": {name: [values[0], values[-1]] for name, values in means.items()},
        "loss_distance": distance,
        "seconds": {name: round(run["seconds"], 1) for name, run in runs.items()},
    }
    return summary, problems


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--steps", type=int, default=2000)
    add("--length", type=int, help="the longest sequence (default: 512 on a GPU, 64 on a CPU)")
    add("--batch", type=int, help="(default: 4 on a GPU, 2 on a CPU)")
    add("--softcap", type=float, default=50.0, help="of the attention logits (default: %(default)s)")
    add("--learning-rate", type=float, default=1e-3)
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="write all losses and figures there as JSON")
    add("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.steps < 6:
        parser.error(f"--steps: expected at least 6, got {args.steps}")
    cpu = args.device == "cpu"
    args.length = args.length or (64 if cpu else 512)
    args.batch = args.batch or (2 if cpu else 4)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    if args.variant:
        print(json.dumps(train(args.variant, args)))
        return 0
    cuda = args.device == "cuda"
    commands = {name: [sys.executable, __file__, *argv, "--variant", name] for name in VARIANTS}
    with ThreadPoolExecutor(len(VARIANTS) if cuda else 1) as pool:  # on a CPU they would only take time from each other
        runner = partial(subprocess.run, capture_output=True, text=True, check=False)
        done = dict(zip(commands, pool.map(runner, commands.values()), strict=True))
    for name, child in done.items():
        if child.returncode != 0:
            print(f"{name} failed:\n{child.stderr[-4000:]}")
            return 1
    runs = {name: json.loads(child.stdout.splitlines()[-1]) for name, child in done.items()}
    summary, problems = judge(runs, (GPU if cuda else CPU).layers)
    print(f"# {torch.cuda.get_device_name() if cuda else 'CPU'}, torch {torch.__version__}, {args.steps} steps")
    for name, run in runs.items():
        print(f"{name:7} {run['seconds']:7.1f} s  graphs {run['graphs']}  memory {run['memory']}")
    for name, value in summary.items():
        print(f"{name}: {value}")
    if args.out:
        args.out.write_text(json.dumps({"summary": summary, "problems": problems, "runs": runs}))
    for words in problems:
        print(f"BAD {words}")
    print("failed" if problems else "ok: memory flat, nothing recompiled, loss equal within noise")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
