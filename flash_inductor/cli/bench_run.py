"""What bench measures, with a progress bar."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .._compat.donation import repeatable_backward
from ..bench import measure, timing
from ..bench import model as models
from ..bench.case import Case
from ..matching.install import disable, enable, is_enabled
from ..report import collect
from . import target
from .errors import UsageError, is_out_of_memory


def machine(device: str) -> dict[str, Any]:
    """The device's name and the versions, for the head of a report."""
    versions: dict[str, Any] = {"torch": torch.__version__}
    if device == "cuda":
        import triton

        versions |= {"triton": triton.__version__, "cudnn": torch.backends.cudnn.version()}
    name = torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return {"device": name, "versions": versions}


def clock(device: str) -> timing.Clock:
    return timing.GpuClock() if device == "cuda" else timing.CpuClock()


def progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def shapes(
    cases: Sequence[Case], names: Sequence[str], device: str, console: Console, ms: float, rounds: int
) -> list[dict[str, Any]]:
    """A cell of ``bench.measure`` for each case."""
    own, cells = clock(device), []
    with warnings.catch_warnings(), repeatable_backward(), progress(console) as bar:
        warnings.simplefilter("ignore")
        for i, case in enumerate(cases):
            # the reference and each implementation; timing them takes about as long as was asked for
            task = bar.add_task(str(case), total=1 + len(names))
            seen: set[str] = set()

            def told(_: str, name: str, task: Any = task, seen: set[str] = seen, case: Case = case) -> None:
                words = "checking" if name not in seen else "timing"
                if name not in seen:
                    bar.advance(task)
                seen.add(name)
                bar.update(task, description=f"{words} {name}: {case}"[:44])

            try:
                cells.append(measure.measure(case, names, device, own, rounds=rounds, total_ms=ms, told=told))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise UsageError(
                    f"not enough memory for {case} (case {i + 1} of {len(cases)}); take a smaller --batch or --length"
                ) from error
            bar.remove_task(task)
    return cells


def model(args: argparse.Namespace, device: str, console: Console, names: Sequence[str]) -> dict[str, Any]:
    """Measure a model's step: what ``bench.model.measure`` gives, the sites of ours, and what is wrong."""
    what = target.load(args)
    train = not args.eval
    compiled: dict[str, Callable[[Any], Any]] = {
        "eager": lambda m: m,
        "stock": torch.compile,
        # A backend of its own: Dynamo would find what it compiled for stock with the same one.
        "ours": lambda m: torch.compile(m, backend="flash_inductor"),
    }
    was_on = is_enabled()
    disable()  # stock is to be stock
    try:
        with warnings.catch_warnings(), progress(console) as bar, collect() as sites:
            warnings.simplefilter("ignore")
            task = bar.add_task("", total=1 + len(names))
            seen: set[str] = set()

            def told(name: str) -> None:
                if name not in seen:
                    bar.advance(task)
                bar.update(task, description=f"{'timing' if name in seen else 'compiling and checking'} {name}")
                seen.add(name)

            data = models.measure(
                what.model,
                what.args,
                what.kwargs,
                train=train,
                compiled={name: compiled[name] for name in names},
                clock=clock(device),
                rounds=args.rounds,
                total_ms=args.ms or 2000.0,
                told=told,
            )
    except ValueError as error:
        raise UsageError(str(error)) from error
    finally:
        if was_on:
            enable()
        torch.compiler.reset()
    failures = []
    if models.wrong(data["implementations"]):
        failures.append(f"ours is farther from float64 than the others: {data['implementations']['ours']['error']:.1e}")
    return {
        "target": args.target,
        "step": "forward, loss and backward" if train else "forward",
        "sites": [site.to_dict() for site in sites],
        **data,
        "failures": failures,
    }
