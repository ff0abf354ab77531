"""Compile with a backend that only rewrites, and compare with eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flash_inductor.matching.rewrite import rewrite_graph
from flash_inductor.report import Site


class Rewriter:
    """A backend: rewrites each graph and runs it as it is."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        self.sites += rewrite_graph(gm.graph)
        gm.graph.lint()
        gm.recompile()
        self.graphs.append(gm)
        return gm.forward

    def ops(self) -> list[str]:
        return [
            getattr(n.target, "__name__", str(n.target))
            for gm in self.graphs
            for n in gm.graph.nodes
            if n.op in ("call_function", "call_method")
        ]


def qkv(
    heads: int = 4,
    kv_heads: int | None = None,
    q_len: int = 12,
    kv_len: int | None = None,
    dim: int = 16,
    batch: int = 2,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random query, key, value [batch, heads, length, dim] that need gradients."""
    generator = torch.Generator().manual_seed(0)
    kv_heads = heads if kv_heads is None else kv_heads
    sizes = [(batch, heads, q_len, dim)] + 2 * [(batch, kv_heads, q_len if kv_len is None else kv_len, dim)]
    return tuple(torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in sizes)  # type: ignore[return-value]


def tensors(out: Any) -> list[torch.Tensor]:
    return [out] if isinstance(out, torch.Tensor) else list(out)


def run(fn: Callable[..., Any], args: Sequence[Any]) -> list[torch.Tensor]:
    """Outputs, then the gradients of all inputs that need one."""
    torch.manual_seed(0)
    outs = tensors(fn(*args))
    needy = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    live = [o for o in outs if o.requires_grad]
    if not live or not needy:
        return [o.detach().clone() for o in outs]
    cotangents = [torch.randn_like(o) for o in live]
    grads = torch.autograd.grad(live, needy, cotangents, allow_unused=True)
    return [o.detach().clone() for o in outs] + [g for g in grads if g is not None]


def compile_and_compare(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    exact: bool = False,
    dynamic: bool | None = None,
    strides: bool = True,
) -> Rewriter:
    """Compile ``fn``, check outputs, their strides and all gradients against eager, and return what was done."""
    torch._dynamo.reset()
    backend = Rewriter()
    actual = run(torch.compile(fn, backend=backend, dynamic=dynamic), args)
    expected = run(fn, args)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        # float32 sums in another order: a few ulps of the largest number, for the small ones come from cancellation
        size = float(e.nan_to_num(0.0, 0.0, 0.0).abs().max()) if e.numel() else 0.0
        atol = 0.0 if exact else 16 * torch.finfo(e.dtype).eps * size
        torch.testing.assert_close(a, e, atol=atol, rtol=0)
    if strides:
        with torch.no_grad():
            for a, e in zip(actual, tensors(fn(*args)), strict=False):
                kept = [(x, y) for x, y, n in zip(a.stride(), e.clone().stride(), e.shape, strict=True) if n > 1]
                assert all(x == y for x, y in kept), (a.stride(), e.stride())
    return backend


def capture(fn: Any, *args: Any, **kwargs: Any) -> torch.fx.GraphModule:
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, **kwargs)(*args)
    return graphs[0]
