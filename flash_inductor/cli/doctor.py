"""``flash-inductor doctor``: exit code 0 if nothing stands in the way, 1 if something does."""

from __future__ import annotations

import argparse
import json
from typing import Any

MARKS = {"ok": ("✓", "green"), "info": ("·", "dim"), "warning": ("!", "yellow"), "problem": ("✗", "bold red")}


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check versions, devices and compilers, and test the kernels on this machine",
        description="Say what is installed and what will run, test the op and a compiled model against float64, and "
        "name problems with their remedies. Takes seconds. Exit code 1 if there is a problem; warnings are none.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--no-compile", action="store_true", help="test the op only, compile no model")
    parser.add_argument("--json", action="store_true", help="print the data as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch
    from rich.console import Console
    from rich.text import Text

    from .. import __version__
    from . import checks, selftest

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    console = Console(stderr=args.json)
    found: list[checks.Check] = []

    def show(check: checks.Check) -> None:
        found.append(check)
        mark, style = MARKS[check.status]
        text = Text.assemble((f"{mark} ", style), (f"{check.name}: ", "bold"), check.text)
        if check.remedy:
            text.append(f"\n    what to do: {check.remedy}", style)
        console.print(text, soft_wrap=True)

    console.print(f"flash_inductor {__version__}, {device}", highlight=False)
    for check in checks.environment(device):
        show(check)
    usable = device == "cpu" or torch.cuda.is_available()
    runs_as = checks.kernels(device) if usable else []
    for row in runs_as:
        console.print(f"  {row['problem']}: {row['kernel']}", style="dim", highlight=False)
    if usable:
        broken = any(c.status == "problem" for c in found)
        for title, test in selftest.tests(device, compile_too=not (args.no_compile or broken)):
            with console.status(f"testing {title}"):
                check = test()
            show(check)
    problems = sum(check.status == "problem" for check in found)
    console.print("everything works" if not problems else f"{problems} problem{'s' * (problems > 1)}", style="bold")
    if args.json:
        data = {
            "version": __version__,
            "device": device,
            "ok": not problems,
            "checks": [check.to_dict() for check in found],
            "kernels": runs_as,
        }
        print(json.dumps(data, indent=1))
    return 1 if problems else 0
