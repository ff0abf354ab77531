"""Reads the arguments, runs the command, and turns what users get wrong into one line and an exit code.

Exit codes: 0 it worked, 1 it found a problem (each command says which; for all a malformed variable), 2 it could not
run: wrong arguments, a file or model that can't be loaded, too little memory.  130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from .. import config
from ..bench.errors import in_one_line
from . import bench, demo, doctor, explain, tune
from .errors import UsageError, is_out_of_memory

COMMANDS = (demo, doctor, explain, bench, tune)
OK, PROBLEM, UNUSABLE, INTERRUPTED = 0, 1, 2, 130


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; each is a module with ``add(commands)``, which sets ``run``."""
    top = argparse.ArgumentParser(
        prog="flash-inductor",
        description="Flash attention for what torch.compile compiles: try it, check it, look into it, measure it.",
        epilog="Exit codes: 0 it worked; 1 it found a problem; 2 it could not run (wrong arguments, a model that can't "
        "be loaded, too little memory).",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    args = parser().parse_args(argv)
    malformed = config.read_environment()[1]
    if malformed and args.command != "doctor":  # which says so among the rest
        for name, why in malformed.items():
            print(f"error: {name}: {why}; correct or unset it", file=sys.stderr)
        return PROBLEM
    try:
        return int(args.run(args))
    except (OSError, UsageError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        logging.getLogger("flash_inductor").debug("out of memory", exc_info=error)
        remedy = "take smaller sizes, or free memory that other processes hold"
        return _fail(f"not enough memory: {in_one_line(error)}; {remedy}")


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return UNUSABLE
