"""``flash_inductor.explain``: what would be rewritten in a model, and why the rest would not, without compiling it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._compat import hooks, unsupported
from .matching.install import is_enabled
from .report import Explanation, compiled_graphs, compiled_sites, redirect

NO_GRAPH = "torch.compile captured no graph at all: nothing could be looked at."
NOT_ON = "The plugin is off: call flash_inductor.enable() before the model is first run."
NOT_RUN = (
    "Nothing has been compiled with the plugin on: a compiled model compiles when it is first called, and not again."
)


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Trace ``model(*args, **kwargs)`` with Dynamo, look for attention in the graphs, and run it eagerly once.

    ``model`` is a module or function, compiled or not.  Nothing is compiled by Inductor and nothing replaced, so it is
    quick, and works whether or not :func:`flash_inductor.enable` is on.  It runs in the grad and autocast mode of the
    caller.  Dynamo's counters, its record of sizes and its code cache are put back; only code that had been compiled
    before keeps one more entry in its cache, until ``torch._dynamo.reset()``.

    Returns an :class:`Explanation`; printing it shows a table.  NotImplementedError on a torch that isn't supported.
    """
    if unsupported.is_unsupported():
        raise NotImplementedError(f"explain: {unsupported.why()}")
    from .matching.fusion_pass import graphs_of, rewrite_or_leave
    from .picture import Picture, take

    if not callable(model):
        raise TypeError(f"model: expected a module or function, got {type(model).__name__}")
    graphs = 0
    pictures: list[Picture] = []

    def look(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        for graph, outer in graphs_of(gm):
            found = rewrite_or_leave(graph, apply=False, outer=outer)
            pictures.append(take(graph, found, number=len(sites) - len(found) + 1))
        return gm.forward

    model = hooks.original(model)
    with hooks.tracing_aside(model) as graph_breaks, redirect() as sites:
        torch.compile(model, backend=look)(*args, **kwargs)
    hints = () if graphs else (NO_GRAPH,)
    return Explanation(tuple(sites), graphs, tuple(graph_breaks), hints, tuple(pictures))


def report() -> Explanation:
    """The attention sites of everything compiled in this process so far, as :func:`explain` shows them.

    Code that Inductor takes from its caches is in it too; what was compiled while the plugin was off is not.
    """
    graphs = compiled_graphs()
    hints = () if graphs else (NOT_RUN,) if is_enabled() else (NOT_ON,)
    return Explanation(tuple(compiled_sites()), graphs, hints=hints)
