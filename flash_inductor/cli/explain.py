"""``flash-inductor explain MODULE:FACTORY``: exit code 0 if every site would be replaced, 1 if one wouldn't or none is
found."""

from __future__ import annotations

import argparse
import json
from typing import Any

from . import target
from .errors import UsageError, is_out_of_memory


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="which attention sites of a model are recognised, and why the others are not",
        description="Trace a model without compiling it and show its attention sites: where they are, what they were "
        "recognised as, which kernel runs them, or why not and what would help. Exit code 1 if a site is left alone or "
        "none found.",
    )
    target.add(parser)
    parser.add_argument("--json", action="store_true", help="print the data as JSON")
    parser.add_argument(
        "--draw", metavar="FILE", help="draw the graph with its sites: .dot, or with Graphviz .svg, .png"
    )
    parser.add_argument(
        "--around", type=int, default=6, metavar="N", help="draw what is so near a site; -1 for all (%(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    import flash_inductor

    what = target.load(args)
    try:
        with torch.set_grad_enabled(not args.eval):
            found = flash_inductor.explain(what.model, *what.args, **what.kwargs)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UsageError(f"the model can't be run with these arguments: {type(error).__name__}: {error}") from error
    if args.json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        found.show()
    if args.draw:
        try:
            found.draw(args.draw, None if args.around < 0 else args.around)
        except (ValueError, RuntimeError) as error:
            raise UsageError(f"--draw: {error}") from error
    return 0 if found.sites and found.replaced == len(found.sites) else 1
