"""Reading a module's buffers while its graph is compiled, and recompiling if they change.  Private Dynamo names."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx


def buffer_value(node: fx.Node) -> torch.Tensor | None:
    """The real tensor of a placeholder or get_attr that is a module's buffer, or None."""
    return None


def guard_unchanged(nodes: Iterable[fx.Node]) -> bool:
    """Make a later change of these buffers recompile; False if that can't be done."""
    return not list(nodes)
