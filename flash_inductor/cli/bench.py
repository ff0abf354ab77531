"""``flash-inductor bench``: exit code 0 if ours ran everywhere and is right, however fast; 1 if not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from . import target
from .errors import UsageError

IMPLEMENTATIONS = ("ours", "stock", "flash", "cudnn", "flex", "fa3", "fa4", "eager")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time attention, or a whole model, beside what else there is on this machine",
        description="Time attention of given sizes, or a step of a model, as this package runs it beside stock "
        "torch.compile, FlashAttention, cuDNN, FlexAttention and eager code, as far as they are installed and take the "
        "problem. Everything is checked against float64 first. Exit code 1 if ours is wrong or fails somewhere.",
    )
    target.add(parser, required=False)
    sizes = parser.add_argument_group("sizes, where no model is given; several values make a grid")
    sizes.add_argument("--batch", type=positive, nargs="+", metavar="B", help="default: 4 on a GPU, 1 on a CPU")
    sizes.add_argument("--heads", type=positive, default=None, metavar="H", help="default: 16 on a GPU, 4 on a CPU")
    sizes.add_argument("--kv-heads", type=positive, metavar="HK", help="default: as many as --heads")
    sizes.add_argument(
        "--length", type=positive, nargs="+", metavar="N", help="default: 1024 4096 on a GPU, 512 on a CPU"
    )
    sizes.add_argument("--head-dim", type=positive, nargs="+", default=[64], metavar="D", help="default: 64")
    sizes.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True, help="default: causal")
    sizes.add_argument("--window", type=positive, metavar="W", help="keys seen to the left, and right unless causal")
    sizes.add_argument("--softcap", type=float, metavar="C")
    sizes.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16, float32 on a CPU"
    )
    parser.add_argument("--impls", default=",".join(IMPLEMENTATIONS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--ms", type=float, help="time to measure each number for (default: 100; of a model 2000)")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="turns of each (default: %(default)s)")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write the data as JSON; - is stdout")
    parser.add_argument("--plot", metavar="FILE", help="draw bars into a .png, .svg or .pdf (needs matplotlib)")
    parser.set_defaults(run=run)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def run(args: argparse.Namespace) -> int:
    import torch
    from rich.console import Console

    from .. import __version__
    from . import bench_run, bench_show

    if args.plot:
        bench_show.check_plot(args.plot)  # before minutes of measuring
    if args.json and args.json != "-" and not Path(args.json).resolve().parent.is_dir():
        raise UsageError(f"--json: there is no folder {Path(args.json).resolve().parent}")
    chosen_device = target.check_device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    device, args.device = chosen_device.type, str(chosen_device)
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device: expected cpu or cuda, got {args.device!r}")
    if chosen_device.index is not None and device == "cuda":
        torch.cuda.set_device(chosen_device)  # of the clock and of tensors made for "cuda"
    console = Console(stderr=args.json == "-")
    data: dict[str, Any] = {"version": __version__, **bench_run.machine(device)}
    console.print(f"{data['device']}; " + ", ".join(f"{k} {v}" for k, v in data["versions"].items()), highlight=False)
    names = chosen(args.impls)
    if args.target:
        data["model"] = bench_run.model(args, device, console, [n for n in ("eager", "stock", "ours") if n in names])
        bench_show.model_table(data["model"], console)
        failures = data["model"]["failures"]
    else:
        found = cases(args, device)
        data["cells"] = bench_run.shapes(found, names, device, console, args.ms or 100.0, args.rounds)
        for cell in data["cells"]:
            bench_show.cell_table(cell, console)
        failures = [text for cell in data["cells"] for text in bench_show.failures(cell)]
    data["failures"] = failures
    for text in failures:
        console.print(f"[bold red]wrong[/bold red]: {text}", highlight=False)
    if args.json == "-":
        print(json.dumps(data, indent=1))
    elif args.json:
        Path(args.json).write_text(json.dumps(data, indent=1) + "\n")
    if args.plot:
        bench_show.plot(data, args.plot)
    return 1 if failures else 0


def chosen(text: str) -> list[str]:
    """The implementations that were asked for; ours is always among them."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in IMPLEMENTATIONS]:
        raise UsageError(f"--impls: expected some of {', '.join(IMPLEMENTATIONS)}, got {', '.join(unknown)}")
    return list(dict.fromkeys(["ours", *names]))


def cases(args: argparse.Namespace, device: str) -> Sequence[Any]:
    """A Case for each combination of the sizes."""
    from ..bench.case import Case

    gpu = device == "cuda"
    heads = args.heads or (16 if gpu else 4)
    kv_heads = args.kv_heads or heads
    if heads % kv_heads:
        raise UsageError(f"--kv-heads: expected a divisor of --heads {heads}, got {kv_heads}")
    if args.softcap is not None and not args.softcap > 0:
        raise UsageError(f"--softcap: expected a positive number, got {args.softcap}")
    batches, lengths = args.batch or [4 if gpu else 1], args.length or ([1024, 4096] if gpu else [512])
    dtype = args.dtype or ("bfloat16" if gpu else "float32")
    return [
        Case("bench", b, heads, kv_heads, n, d, args.causal, args.window, args.softcap, dtype=dtype, layout="bnhd")
        for b, n, d in product(batches, lengths, args.head_dim)
    ]
