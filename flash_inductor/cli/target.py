"""``module:factory`` on the command line: a model and what to call it with.

The factory is called without arguments and returns the model, or ``(model, args)`` or ``(model, args, kwargs)``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..bench.model import mapped
from .errors import UsageError, is_out_of_memory

DTYPES = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64", "int64", "int32", "bool")
}


@dataclass
class Target:
    """A model or function, and the arguments of a call."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def add(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """The options that say which model; :func:`load` reads them."""
    parser.add_argument(
        "target",
        metavar="MODULE:FACTORY",
        nargs=None if required else "?",
        help="a function that returns the model, or (model, args), or (model, args, kwargs); the module is looked for "
        "in the current folder too",
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE[:DTYPE[:HIGH]]",
        help="an argument of the model, instead of the factory's: 2x1024:int64:32000 are token ids below 32000, "
        "2x1024x512:bfloat16 are normal numbers (default: float32; integers below 2); once for each argument",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--train", action="store_true", help="put the model into training mode")
    mode.add_argument("--eval", action="store_true", help="put it into evaluation mode, without gradients")
    parser.add_argument("--device", metavar="DEVICE", help="move model and arguments there: cpu, cuda, cuda:1")


def load(args: argparse.Namespace) -> Target:
    """Import, call the factory, and prepare what it returns; UsageError says what is wrong."""
    model, positional, keywords = unpack(args.target, call_factory(args.target))
    if args.input:
        positional, keywords = tuple(parse_input(text, i) for i, text in enumerate(args.input)), {}
    if not positional and not keywords and isinstance(model, torch.nn.Module):
        raise UsageError(
            f"{args.target} returns a model and no arguments for it; return (model, args) from it, or pass --input, as "
            "in --input 2x1024:int64:32000"
        )
    if isinstance(model, torch.nn.Module) and (args.train or args.eval):
        model.train(args.train)
    if args.device:
        device = check_device(args.device)
        if isinstance(model, torch.nn.Module):
            model.to(device)
        positional, keywords = (mapped(lambda x: x.to(device), part) for part in (positional, keywords))
    return Target(model, positional, keywords)


def check_device(name: str) -> torch.device:
    """UsageError where there is no such device."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise UsageError(f"--device: {name!r} can't be used: {why}") from error
    return device


def call_factory(target: str) -> Any:
    """What the factory returns."""
    module_name, colon, path = target.partition(":")
    if not colon or not module_name or not path:
        raise UsageError(f"expected MODULE:FACTORY, as in my_package.models:make, got {target!r}")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:  # a console script doesn't look into the current folder
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise UsageError(f"{module_name} needs the module {error.name}, which is not installed") from error
        raise UsageError(
            f"there is no module {module_name!r}; write it as in an import statement (models.gpt, not models/gpt.py), "
            f"it is looked for in {here} and where Python packages are installed"
        ) from error
    except Exception as error:
        raise UsageError(f"importing {module_name} failed: {_last_words(error)}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            names = [n for n in vars(found) if not n.startswith("_") and callable(getattr(found, n))]
            raise UsageError(f"{module_name} has no {path!r}; it has {', '.join(names) or 'nothing to call'}")
        found = getattr(found, name)
    if not callable(found):
        raise UsageError(f"{target} is a {type(found).__name__}; expected a function or class to call")
    try:
        return found()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UsageError(f"{target}() failed, it is called without arguments: {_last_words(error)}") from error


def unpack(target: str, result: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """(model, args, kwargs) of any form that a factory may return."""
    parts = result if isinstance(result, tuple) else (result,)
    model, *rest = parts if parts else (None,)
    positional: Any = rest[0] if rest else ()
    keywords: Any = rest[1] if len(rest) > 1 else {}
    if len(rest) == 1 and isinstance(positional, Mapping):
        positional, keywords = (), positional
    if isinstance(positional, torch.Tensor):
        positional = (positional,)
    fits = callable(model) and isinstance(positional, Sequence) and isinstance(keywords, Mapping) and len(rest) < 3
    if not fits:
        raise UsageError(
            f"{target}() returned {_kind(result)}; expected a model, (model, args) or (model, args, kwargs), where the "
            "model can be called, args is a tuple and kwargs a dict"
        )
    return model, tuple(positional), dict(keywords)


def parse_input(text: str, seed: int = 0) -> torch.Tensor:
    """A random tensor of "2x1024:int64:32000"."""
    shape, _, rest = text.partition(":")
    dtype_name, _, high = rest.partition(":")
    dtype = DTYPES.get(dtype_name or "float32")
    try:
        size = [int(n) for n in shape.replace(",", "x").split("x")]
        limit = int(high) if high else 2
    except ValueError:
        size, limit = [-1], 0
    if dtype is None or min(size) < 0 or limit < 1:
        raise UsageError(
            f"--input: expected SHAPE[:DTYPE[:HIGH]], as in 2x1024:int64:32000, with a dtype out of "
            f"{', '.join(DTYPES)}; got {text!r}"
        )
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator).to(dtype)
    return torch.randint(limit, size, generator=generator).to(dtype)


def _kind(value: Any) -> str:
    inside = ", ".join(type(x).__name__ for x in value) if isinstance(value, tuple) else ""
    return f"({inside})" if isinstance(value, tuple) else type(value).__name__


def _last_words(error: BaseException) -> str:
    """The error and where it happened, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
