"""``torch.compile(model, backend="flash_inductor")``: rewrite the attention, then what backend="inductor" does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._compat import hooks


def flash_inductor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """A Dynamo backend.  ``mode`` and ``options`` are those of ``torch.compile``; a bad one raises RuntimeError there.

    Works whether or not ``flash_inductor.enable()`` is on, and rewrites once.
    """
    from .matching import install

    inductor = hooks.inductor_backend(mode, options)  # first: it checks the arguments
    install.attempt(_rewrite, gm)
    with install.held_off():
        return inductor(gm, example_inputs)


def _rewrite(gm: torch.fx.GraphModule) -> None:
    from .matching.fusion_pass import ensure_key, graphs_of, rewrite_or_leave

    ensure_key()
    for graph, outer in graphs_of(gm):  # not recompiled: Inductor reads the graphs, and recompiles after its own passes
        rewrite_or_leave(graph, outer=outer)
