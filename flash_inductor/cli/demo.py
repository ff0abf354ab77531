"""``flash-inductor demo``: exit code 0 if sites were replaced and the losses are equal within rounding, 1 if not."""

from __future__ import annotations

import argparse
from typing import Any

from .errors import UsageError


def step_count(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"expected at least 2, got {value}")
    return value


def add(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a small language model with and without the plugin and compare",
        description="Train a small language model with and without the plugin, each in a process of its own, and "
        "compare losses, time and memory.",
    )
    demo.add_argument("--text", metavar="FILE", help="text to train on (default: Python's own language reference)")
    demo.add_argument("--steps", type=step_count, metavar="N", help="training steps of each run")
    demo.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    demo.add_argument("--json", action="store_true", help="print the result as JSON on stdout, the rest on stderr")
    demo.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..demo.train import run_demo

    try:
        return run_demo(args)
    except ValueError as error:
        raise UsageError(str(error)) from error
