"""Random attention graphs through the matcher: the meaning of each is kept exactly, whatever is made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_inductor.matching.rewrite import rewrite_graph
from flash_inductor.report import Site

from .changes import CHANGES
from .spellings import SPELLINGS, Spelling, inputs, make

TOLERANCE = 1e-9  # of the largest number; everything is float64


def run(fn: Callable[..., tuple[Tensor, ...]], args: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Results, and the gradients of all inputs that may have one."""
    outs = list(fn(*args))
    live = [o for o in outs if o.requires_grad]
    needy = [a for a in args if a.requires_grad]
    if not live:
        return outs, []
    g = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(o.shape, generator=g, dtype=o.dtype) for o in live]
    return [o.detach() for o in outs], list(torch.autograd.grad(live, needy, cotangents, allow_unused=True))


def near(actual: Tensor | None, expected: Tensor | None) -> bool:
    if actual is None or expected is None:  # a gradient of zeros may be left out
        given = expected if actual is None else actual
        return given is None or given.count_nonzero() == 0
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    return bool((actual - expected).abs().max() <= TOLERANCE * (1 + expected.abs().max()))


def check(how: Spelling, changed: frozenset[str], seed: int) -> list[Site] | None:
    """Compare with eager; gives what was found, or None where eager itself raises or gives infinite numbers."""
    fn, args = make(how, changed), inputs(how, seed)
    try:
        expected, expected_grads = run(fn, args)
    except RuntimeError:
        return None
    if not all(x.isfinite().all() for x in [*expected, *expected_grads] if x is not None):
        return None
    sites: list[Site] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        sites.extend(rewrite_graph(gm.graph))
        gm.graph.lint()
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    actual, grads = run(torch.compile(fn, backend=backend), inputs(how, seed))
    said = [s.describe() for s in sites]
    for name, got, want in (("result", actual, expected), ("gradient", grads, expected_grads)):
        assert len(got) == len(want), (name, said)
        for i, (a, e) in enumerate(zip(got, want, strict=True)):
            assert near(a, e), (name, i, said)
    return sites


@settings(max_examples=max(60, settings.default.max_examples))
@given(SPELLINGS, st.sets(st.sampled_from(CHANGES), min_size=1, max_size=2), st.integers(0, 9))
def test_a_changed_detail_is_kept_or_left_alone(how: Spelling, changed: set[str], seed: int) -> None:
    sites = check(how, frozenset(changed), seed)
    assume(sites is not None)
    event("replaced" if any(s.replaced for s in sites or ()) else "left alone")


@given(SPELLINGS, st.integers(0, 9))
def test_every_spelling_is_replaced(how: Spelling, seed: int) -> None:
    sites = check(how, frozenset(), seed)
    assume(sites is not None)  # eager gives NaN for a row that sees nothing
    assert sites is not None
    assert len(sites) == 1
    assert sites[0].replaced, sites[0].reason
