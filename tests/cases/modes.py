"""The ways to run a case: as it is, rewritten and traced by AOTAutograd without code generation, or compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.debugging import aot_eager

import flash_inductor
from flash_inductor.matching.fusion_pass import graphs_of, rewrite_or_leave

from .book import Case
from .judge import run_case

MODES = ("eager", "fast", "compile", "stock")


def rewrite_then_trace(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
    """A backend: the pass as in Inductor, then AOTAutograd, whose graphs run op by op."""
    for graph, outer in graphs_of(gm):
        rewrite_or_leave(graph, outer=outer)
        outer_or_own = graph.owning_module
        if outer_or_own is not None:
            outer_or_own.recompile()
    return aot_eager(gm, example_inputs)


def wrap_for(mode: str) -> Callable[..., Any]:
    """What a case applies to the function that it tests."""

    def eager(fn: Any, **compile_options: Any) -> Any:
        return fn

    def fast(fn: Any, **compile_options: Any) -> Any:
        compile_options.pop("mode", None)  # Inductor's own
        return torch.compile(fn, backend=rewrite_then_trace, **compile_options)

    def compiled(fn: Any, **compile_options: Any) -> Any:
        return torch.compile(fn, **compile_options)

    return {"eager": eager, "fast": fast}.get(mode, compiled)


def run(case: Case, dtype: str, mode: str, device: str = "cpu") -> None:
    """Raises AssertionError if the answer is wrong, or what the case's code raises."""
    torch._dynamo.reset()
    strict = flash_inductor.override(strict=True)
    if mode == "compile":
        with strict, flash_inductor.enabled():
            run_case(case, wrap_for(mode), device, dtype)
    else:
        with strict:
            run_case(case, wrap_for(mode), device, dtype, strict_eager=mode == "eager")
