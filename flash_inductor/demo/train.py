"""The demo's command: train both variants in child processes, then compare them."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .settings import Settings, load_text

# The plugin's curve may be this many times as far from stock's as eager's is: both differ from stock only in the order
# of roundings, and the maximum over a few dozen steps of two such differences varies by a small factor.
ROUNDING_FACTOR = 8.0


class WorkerError(RuntimeError):
    """A training run died; the message is the end of what it wrote."""


def run_worker(variant: str, settings: Settings, progress: Progress) -> dict[str, Any]:
    """Train one variant in a child process: {"train": [steps], "eager": [steps], "done": {...}}.

    The child has compile caches of its own, so that first-step times compare and every graph is really compiled.
    """
    phases = {"stock": ["train", "eager"], "plugin": ["train"]}[variant]
    titles = {"train": f"torch.compile, {variant}", "eager": "eager, the yardstick of rounding"}
    tasks = {phase: progress.add_task(titles[phase], total=settings.steps, loss="") for phase in phases}
    progress.update(tasks["train"], loss="compiling")
    record: dict[str, Any] = {phase: [] for phase in phases}
    command = [sys.executable, "-m", "flash_inductor.demo.worker", variant, json.dumps(settings.to_dict())]
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile("w+") as errors:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env) as child:
            for line in child.stdout or ():
                if not line.startswith('{"event"'):
                    continue  # a library's print
                data = json.loads(line)
                if data.pop("event") == "done":
                    record["done"] = data
                else:
                    phase = data.pop("phase")
                    record[phase].append(data)
                    progress.update(tasks[phase], advance=1, loss=f"loss {data['loss']:.3f}")
        if child.returncode != 0 or "done" not in record:
            errors.seek(0)
            tail = "\n".join(errors.read().splitlines()[-25:])
            raise WorkerError(f"the {variant} run ended with status {child.returncode}:\n{tail}")
    if not progress.console.is_terminal:  # a log shows no moving bar
        progress.console.print(f"{titles['train']}: {settings.steps} steps done", highlight=False)
    return record


def summarise(settings: Settings, stock: dict[str, Any], plugin: dict[str, Any]) -> dict[str, Any]:
    """The comparison as JSON-ready data."""

    def curve(steps: list[dict[str, Any]]) -> list[float]:
        return [s["loss"] for s in steps]

    def farthest(a: list[float], b: list[float]) -> float:
        differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
        return math.nan if any(map(math.isnan, differences)) else max(differences)  # max() may lose a NaN

    def numbers(record: dict[str, Any]) -> dict[str, Any]:
        seconds = [s["seconds"] for s in record["train"]]
        done = record["done"]
        return {
            "losses": curve(record["train"]),
            "first_step_s": seconds[0],
            "step_ms": 1e3 * statistics.median(seconds[1:]),
            "peak_mib": done["peak_bytes"] / 2**20,
            "step_mib": (done["peak_bytes"] - done["idle_bytes"]) / 2**20 if done["idle_bytes"] else None,
        }

    ours, theirs = curve(plugin["train"]), curve(stock["train"])
    yardstick = farthest(curve(stock["eager"]), theirs)
    unit = torch.finfo(getattr(torch, settings.dtype)).eps * max(theirs)
    difference, allowed = farthest(ours, theirs), ROUNDING_FACTOR * max(yardstick, unit)
    sites = plugin["done"]["sites"]
    return {
        "settings": settings.to_dict(),
        "torch": stock["done"]["torch"],
        "device": stock["done"]["device"],
        "parameters": stock["done"]["parameters"],
        "text_bytes": len(load_text(settings.text)),
        "sites": sites,
        "replaced": sum(s["replaced"] for s in sites),
        "stock": numbers(stock),
        "plugin": numbers(plugin),
        "max_loss_difference": difference,
        "eager_loss_difference": yardstick,
        "allowed_loss_difference": allowed,
        "equal_within_rounding": bool(difference <= allowed),  # False for NaN
    }


def print_summary(result: dict[str, Any], console: Console) -> None:
    stock, plugin = result["stock"], result["plugin"]

    table = Table("attention site", "recognised as", "runs as", title="What the plugin did")
    for site in result["sites"]:
        runs_as = site["kernel"] or "flashbwd::attn" if site["replaced"] else f"left alone: {site['reason']}"
        table.add_row(*map(escape, (site["location"] or site["node"], site["recognised_as"] or "-", runs_as)))
    console.print(table)
    console.print(f"Sites replaced: [bold]{result['replaced']} of {len(result['sites'])}[/bold]\n")

    table = Table("step", "stock", "plugin", "difference", title="Loss")
    steps = len(stock["losses"])
    for i in sorted({round(k * (steps - 1) / 6) for k in range(7)}):
        a, b = stock["losses"][i], plugin["losses"][i]
        table.add_row(str(i), f"{a:.5f}", f"{b:.5f}", f"{abs(a - b):.1e}")
    console.print(table)
    verdict = "[green]equal[/green]" if result["equal_within_rounding"] else "[red]DIFFERENT[/red]"
    console.print(
        f"Largest difference {result['max_loss_difference']:.1e}; stock torch.compile and eager differ by "
        f"{result['eager_loss_difference']:.1e}: {verdict} within the rounding of {result['settings']['dtype']} "
        f"(up to {result['allowed_loss_difference']:.1e} allowed)\n"
    )

    table = Table("", "stock", "plugin", "stock / plugin", title="Cost")
    rows = [("step, ms (median)", "step_ms"), ("first step with compilation, s", "first_step_s")]
    rows += [("memory of a step, MiB (peak - idle)", "step_mib"), ("peak memory, MiB", "peak_mib")]
    for title, key in rows:
        a, b = stock[key], plugin[key]
        if a is not None and b is not None:
            table.add_row(title, f"{a:.1f}", f"{b:.1f}", f"{a / b:.2f}x" if b > 0 else "-")
    console.print(table)


def run_demo(args: argparse.Namespace) -> int:
    """Run and print; the exit status is 0 if a site was replaced and the losses are equal within rounding."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings.for_device(device, steps=args.steps, text=args.text)
    size = len(load_text(settings.text))
    if size <= settings.length:
        raise ValueError(f"--text: expected a file of more than {settings.length} bytes, got {size}")
    console = Console(stderr=args.json)
    m = settings.model
    console.print(
        f"Training a {m.layers}-layer Gemma-2-style model ({m.heads} query heads, {m.kv_heads} key heads, window "
        f"{m.window} in every other layer, cap {m.attention_cap:g}) on {size:,} bytes of "
        f"{settings.text or 'the Python language reference'}: {settings.steps} steps of {settings.batch} x "
        f"{settings.length} tokens, {settings.dtype}, {device}.\n",
        highlight=False,
    )
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as progress:
            stock, plugin = (run_worker(variant, settings, progress) for variant in ("stock", "plugin"))
    except WorkerError as error:
        console.print(f"[red]Demo failed[/red]: {escape(str(error))}", highlight=False)
        return 1
    result = summarise(settings, stock, plugin)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        print_summary(result, console)
    return 0 if result["replaced"] and result["equal_within_rounding"] else 1
