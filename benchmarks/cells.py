"""What the training-step benchmarks share: a cell, how it is measured and compared, and the table.

A cell is one model with one implementation.  Cells of one model run one after another in this process, or with
``--side-by-side`` in a process each: they compile at the same time, and are timed one at a time when all have compiled.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")  # first-step times must compile; sites must be seen

import torch
import transformers
from kinds import gpu_ms

import flash_inductor
from flash_inductor.bench.errors import in_one_line
from flash_inductor.report import collect

STOCK = ("sdpa", "eager", "flex_attention")
# Relative distance of losses and gradient norms that rounding explains, where stock's own spread isn't larger.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-18}


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
    gpu_ms: dict[str, float] = field(default_factory=dict)  # a step's, by what it is spent on, with --profile
    error: str | None = None


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


def measure_steps(
    cell: Cell, model: torch.nn.Module, inputs: dict[str, torch.Tensor], args: argparse.Namespace
) -> Cell:
    """Losses, time and memory of training steps; a step is forward, loss and backward, without the optimizer."""
    cuda = args.device == "cuda"
    with flash_inductor.enabled() if cell.impl.startswith("ours-") else nullcontext(), collect() as sites:
        compiled = torch.compile(model, dynamic=False)

        def step() -> torch.Tensor:
            loss = compiled(**inputs).loss
            loss.backward()
            return loss.detach()

        def bare_step() -> None:
            step()
            model.zero_grad(set_to_none=True)

        learn(step, model, cell, args)
        for _ in range(args.warmup):
            bare_step()
        with turn(args.turn):
            bare_step()
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            cell.step_ms = statistics.median(time_step(bare_step, cuda) for _ in range(args.repeat))
            if args.profile:
                cell.gpu_ms = gpu_ms(bare_step)
    if cuda:
        cell.peak_gib = torch.cuda.max_memory_allocated() / 2**30
    cell.replaced = sum(site.replaced for site in sites)
    cell.left_alone = [site.reason or site.node for site in sites if not site.replaced]
    return cell


@contextmanager
def turn(folder: Path | None) -> Iterator[None]:
    """The time in which this process alone is measured, after all others of ``folder`` have compiled."""
    if folder is None:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    (folder / f"{os.getpid()}.ready").touch()
    expected = int((folder / "expected").read_text())
    while len(list(folder.glob("*.ready"))) < expected:
        time.sleep(0.1)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def guarded(measure: Callable[..., Cell], name: str, impl: str, args: argparse.Namespace) -> Cell:
    """``measure``, with a failure as a cell; leaves no compiled code and no memory to the next cell."""
    try:
        cell = measure(name, impl, args)
    except Exception as error:
        cell = Cell(name, impl, error=in_one_line(error)[:170])
    torch._dynamo.reset()
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return cell


def side_by_side(script: str, names_option: str, name: str, args: argparse.Namespace) -> list[Cell]:
    """All cells of a model, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "expected").write_text(str(len(args.impls)))
        children = {}
        for impl in args.impls:
            command = [sys.executable, script, names_option, name, "--impls", impl, "--turn", folder]
            command += ["--out", f"{folder}/{impl}.json", *_passed_on(args)]
            children[impl] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        waiting = dict(children)
        while waiting:
            for impl in [i for i, child in waiting.items() if child.poll() is not None]:
                # One that failed before its turn must not keep the others waiting.
                (Path(folder) / f"{waiting.pop(impl).pid}.ready").touch()
            time.sleep(0.1)
        cells = []
        for impl, child in children.items():
            out = Path(folder) / f"{impl}.json"
            if out.exists():
                cells += [Cell(**cell) for cell in json.loads(out.read_text())["cells"]]
            else:
                cells.append(Cell(name, impl, error=f"the process ended with exit code {child.returncode}"))
        return cells


def _passed_on(args: argparse.Namespace) -> list[str]:
    given: list[str] = []
    for name in ("device", "repeat", "warmup", "loss_steps", "learning_rate", "seed"):
        given += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    given += [f"--{name.replace('_', '-')}" for name in ("tiny", "no_dropout", "profile") if getattr(args, name, False)]
    return given


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that the scripts share."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the script")
    parser.add_argument("--repeat", type=int, default=10, metavar="N", help="timed steps; their median is reported")
    parser.add_argument("--warmup", type=int, default=3, metavar="N", help="untimed steps before them")
    parser.add_argument("--loss-steps", type=int, default=4, metavar="N", help="SGD steps whose losses are compared")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side-by-side", action="store_true", help="compile the cells of a model at the same time")
    parser.add_argument("--profile", action="store_true", help="GPU time of attention, products and the rest")
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write everything there as JSON")


def finish_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace, known: dict[str, Any]) -> None:
    """Split and check lists of names; ``known`` has the valid ones for each option."""
    for option, names in known.items():
        values = getattr(args, option).split(",")
        setattr(args, option, values)
        if unknown := [v for v in values if v not in names]:
            parser.error(f"--{option}: expected some of {', '.join(names)}, got {', '.join(unknown)}")
    if args.profile and args.device != "cuda":
        parser.error("--profile: expected --device cuda, whose kernels are timed")
    args.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32


def run(
    script: str,
    measure: Callable[..., Cell],
    names_option: str,
    args: argparse.Namespace,
    argv: Sequence[str],
    compared: Callable[[str], bool] = lambda name: True,
) -> int:
    """Measure all cells, print them as they come and as a table, and write them to ``args.out`` after each.

    ``names_option`` is the option of the script that chooses models; ``compared`` says whose losses can be compared.
    """
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_float32_matmul_precision("high")
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    command = " ".join(["python", f"benchmarks/{Path(script).name}", *argv])
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "device": device}
    print(command, *(f"{k} {v}" for k, v in versions.items()), sep="\n", flush=True)

    cells: list[Cell] = []
    for name in getattr(args, names_option.lstrip("-")):
        group: list[Cell] = []
        source = (
            side_by_side(script, names_option, name, args)
            if args.side_by_side
            else (guarded(measure, name, impl, args) for impl in args.impls)
        )
        for cell in source:
            group.append(cell)
            if compared(name):
                compare(group, ROUNDING[args.dtype])
            print(f"# {row(cell)}", flush=True)
            if args.out is not None:  # after each cell: an interrupted run keeps what it measured
                data = {"command": command, **versions, "cells": [asdict(c) for c in (*cells, *group)]}
                args.out.write_text(json.dumps(data, indent=1) + "\n")
        cells += group

    print("\n" + "{:12} {:15} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}".format(*HEADER))
    print("\n".join(row(cell) for cell in cells))
    for cell in cells:
        if cell.gpu_ms:
            parts = ", ".join(f"{kind} {ms:.2f}" for kind, ms in sorted(cell.gpu_ms.items()))
            print(f"{cell.family} {cell.impl} GPU ms a step: {parts}")
        if cell.impl.startswith("ours-") and cell.left_alone:
            print(f"{cell.family} {cell.impl} left alone: {'; '.join(sorted(set(cell.left_alone)))}")
    return 0
