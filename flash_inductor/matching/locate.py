"""Where in the user's code a node comes from."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from torch import fx

from .canonical import tensor

_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)')


def location(node: fx.Node) -> tuple[str | None, str | None]:
    """("file.py:12 in forward", the source line) of the innermost frame of the user's code."""
    lines = (node.meta.get("stack_trace") or node.stack_trace or "").splitlines()
    found: tuple[str | None, str | None] = (None, None)
    for position, line in enumerate(lines):
        match = _FRAME.search(line)
        if match is not None:
            source = lines[position + 1].strip() if position + 1 < len(lines) else ""
            where = f"{os.path.basename(match['file'])}:{match['line']} in {match['function']}"
            found = (where, source or None)
    return found


def module(node: fx.Node) -> str | None:
    """The path of the innermost module that the node belongs to, as in ``model.layers.0.self_attn``."""
    around = modules(node)
    if not around:
        return None
    path, kind = around[-1]
    return path or kind


def modules(node: fx.Node) -> list[tuple[str, str | None]]:
    """(path, class name) of each module that the node belongs to, outermost first.

    The module that is compiled itself isn't among them: Dynamo doesn't name it.
    """
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    return [(_path(entry), type_name(entry)) for entry in stack.values()]


def _path(entry: Any) -> str:
    path = str(entry[0] if isinstance(entry, tuple) else entry)
    path = re.sub(r"^L\[['\"]self['\"]\]\.?|^L__self___?", "", path)
    path = re.sub(r"\.?(_modules|__dict__)\b", "", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path).lstrip(".")
    return re.sub(r"^L\.(args\.\d+|\w+)\.?", "", path)  # the module was an argument of what was compiled


def type_name(entry: Any) -> str | None:
    kind = entry[1] if isinstance(entry, tuple) and len(entry) > 1 else None
    return None if kind is None else getattr(kind, "__name__", str(kind).rsplit(".", 1)[-1])


_SHORT = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64"}


def shape(node: Any) -> str:
    """``bf16[2, 8, 4096, 64]``."""
    value = tensor(node)
    if value is None:
        return "?"
    dtype = _SHORT.get(value.dtype, str(value.dtype).removeprefix("torch."))
    return f"{dtype}[{', '.join(str(s) for s in value.shape)}]"
