"""Coverage of one model: the sites that the detector sees, and what the package's pass makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.registry import lookup_backend

from flash_inductor.matching.fusion_pass import graphs_of
from flash_inductor.matching.install import held_off
from flash_inductor.matching.rewrite import rewrite_graph
from flash_inductor.report import Site, redirect

from .detector import sites_of_module

CAPTURED = "captured graph"  # names the profiler's range around a graph's run


@dataclass
class Coverage:
    """What became of the sites of one model in one mode."""

    sites: int = 0  # by the detector, and calls of SDPA outside of every graph
    replaced: int = 0  # of those, gone from the graphs after the pass
    outside: int = 0  # calls of SDPA that graph breaks keep from every graph
    reported: int = 0  # sites that the pass says it replaced: may exceed ``replaced`` where it knows a form better
    graphs: int = 0
    left: list[dict[str, str]] = field(default_factory=list)  # form, chain and reason of each site left alone


def pass_then(backend: str | None, coverage: Coverage) -> Callable[..., Any]:
    """A backend that runs the pass on each graph, counts, and compiles the rest with ``backend`` (None: runs it)."""

    def compile_graph(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        before = sites_of_module(gm)
        with redirect() as recorded:
            for graph, outer in graphs_of(gm):
                rewrite_graph(graph, outer=outer)
                graph.lint()
        for module in gm.modules():
            if isinstance(module, fx.GraphModule):
                module.recompile()
        after = sites_of_module(gm)
        coverage.graphs += 1
        coverage.sites += len(before)
        coverage.replaced += len(before) - len(after)
        coverage.reported += sum(site.replaced for site in recorded)
        coverage.left += [
            {"form": site.form, "chain": site.chain, "reason": _reason(site.node, recorded)} for site in after
        ]
        if backend is None:
            run: Callable[..., Any] = gm.forward
        else:
            with held_off():  # Inductor must not run the pass again
                run = lookup_backend(backend)(gm, inputs)

        def named(*args: Any) -> Any:
            with torch.profiler.record_function(CAPTURED):
                return run(*args)

        return named

    return compile_graph


def _reason(node: fx.Node, recorded: list[Site]) -> str:
    """Why the pass left a site alone; the records name its last node, which may come after the softmax."""
    refused = {site.node: site.reason for site in recorded if site.reason is not None}
    here = node
    for _ in range(12):
        if here.name in refused:
            return refused[here.name] or ""
        if len(here.users) != 1:
            break
        here = next(iter(here.users))
    return "; ".join(sorted(set(map(str, refused.values())))) if refused else "not seen by the pass"


@contextmanager
def grad_mode(train: bool) -> Iterator[None]:
    with nullcontext() if train else torch.no_grad():
        yield


def measure(
    model: nn.Module, inputs: dict[str, Any], *, train: bool, dynamic: bool | None = False, call: Any = None
) -> Coverage:
    """Trace and run a model with the pass, and without Inductor.

    Args:
        call: What is called instead of ``model`` (a wrapper of it: autocast, checkpointing).
    """
    warm_up(model, inputs)
    torch._dynamo.reset()
    coverage = Coverage()
    compiled = torch.compile(call or model, backend=pass_then(None, coverage), dynamic=dynamic)
    with grad_mode(train):
        compiled(**inputs)
        count_outside(compiled, inputs, coverage)
    return coverage


def warm_up(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Run once in eager: some models make buffers in their first call, after which they would be compiled again."""
    with torch.no_grad():
        model(**inputs)


def count_outside(compiled: Callable[..., Any], inputs: dict[str, Any], coverage: Coverage) -> None:
    """Add the calls of SDPA that are in no graph, seen by the profiler in another run: they stay in the denominator."""
    graphs = coverage.graphs
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        compiled(**inputs)
    if coverage.graphs != graphs:
        raise RuntimeError(f"the second run compiled again ({coverage.graphs} graphs after {graphs})")
    calls = [event for event in profile.function_events if event.name == "aten::scaled_dot_product_attention"]
    coverage.outside = sum(not _inside(event) for event in calls)
    coverage.sites += coverage.outside
    reason = "outside of every graph, after a graph break; TORCH_LOGS=graph_breaks names it"
    coverage.left += [{"form": "sdpa", "chain": "sdpa", "reason": reason}] * coverage.outside


def _inside(event: Any) -> bool:
    while event is not None:
        if event.name == CAPTURED:
            return True
        event = event.cpu_parent
    return False
