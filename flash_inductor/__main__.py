"""``python -m flash_inductor demo``: the command line."""

from __future__ import annotations

import argparse
import sys


def step_count(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"expected at least 2, got {value}")
    return value


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flash_inductor", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a small language model with and without the plugin and compare")
    demo.add_argument("--text", metavar="FILE", help="text to train on (default: Python's own language reference)")
    demo.add_argument("--steps", type=step_count, metavar="N", help="training steps of each run")
    demo.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    demo.add_argument("--json", action="store_true", help="print the result as JSON on stdout, the rest on stderr")
    args = parser.parse_args(argv)

    from .demo.train import run_demo

    try:
        return run_demo(args)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
