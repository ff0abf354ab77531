"""Sites in the bodies of higher-order operations, whose masks come in as arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from site_helpers import Rewriter
from torch.utils.checkpoint import checkpoint

from flash_inductor.matching.fusion_pass import graphs_of
from flash_inductor.matching.rewrite import rewrite_graph

N, D, H = 12, 32, 4


class BodyRewriter(Rewriter):
    """Rewrites bodies as well, as the pass in Inductor does."""

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        for graph, outer in graphs_of(gm):
            self.sites += rewrite_graph(graph, outer=outer)
        for module in reversed(list(gm.modules())):
            if isinstance(module, torch.fx.GraphModule):
                module.graph.lint()
                module.recompile()
        self.graphs.append(gm)
        return gm.forward

    def bodies(self) -> list[torch.fx.GraphModule]:
        return [m for gm in self.graphs for m in gm.children() if isinstance(m, torch.fx.GraphModule)]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class EagerLayer(Layer):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores + mask[:, :, :, : k.shape[-2]]
        return x + (torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2).flatten(2)


def causal(n: int) -> torch.Tensor:
    i = torch.arange(n)
    return (i[None, :] <= i[:, None])[None, None]


def added(mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, torch.zeros((), dtype=torch.float32), torch.finfo(torch.float32).min)


class Model(nn.Module):
    """Two checkpointed layers with masks made outside."""

    def __init__(self, kind: type[nn.Module] = Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([kind(), kind()])

    def masks(self, x: torch.Tensor, *more: Any) -> list[torch.Tensor]:
        return [causal(x.shape[1])] * 2

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        for layer, mask in zip(self.layers, self.masks(x, *more), strict=True):
            x = checkpoint(layer, x, mask, use_reentrant=False)
        return x


class Additive(Model):
    def masks(self, x: torch.Tensor, *more: Any) -> list[torch.Tensor]:
        return [added(causal(x.shape[1]))] * 2


def check(model: nn.Module, *more: Any, dynamic: bool | None = None) -> BodyRewriter:
    torch._dynamo.reset()
    backend = BodyRewriter()
    x = torch.randn(2, N, D, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def run(fn: Any) -> list[torch.Tensor]:
        out = fn(x, *more)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]

    expected, actual = run(model), run(torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, atol=64 * torch.finfo(e.dtype).eps * float(e.detach().abs().max()), rtol=0)
    return backend


def bands(backend: BodyRewriter) -> list[tuple[Any, Any] | None]:
    return [None if s.spec is None else (s.spec.mask.lower, s.spec.mask.upper) for s in backend.sites]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("model", "kind"), [(Model, Layer), (Additive, EagerLayer)])
def test_a_mask_from_outside_is_proved(model: Any, kind: type[nn.Module], dynamic: bool) -> None:
    backend = check(model(kind), dynamic=dynamic)
    assert [s.replaced for s in backend.sites] == [True, True], [s.reason for s in backend.sites]
    assert bands(backend) == [(None, 0)] * 2
    for body in backend.bodies():
        names = [n.name for n in body.graph.nodes]
        assert not any("arange" in name or "where" in name for name in names), "the copy is gone"


def test_masks_of_several_layers_differ() -> None:
    class Mixed(Model):
        def masks(self, x: torch.Tensor, *more: Any) -> list[torch.Tensor]:
            full = causal(x.shape[1])
            return [full, full & full.logical_not().triu(-2).logical_or(full).triu(-3)]

    backend = check(Mixed())
    assert [s.replaced for s in backend.sites] == [True, True]
    assert bands(backend) == [(None, 0), (-3, 0)]


def test_a_mask_in_a_buffer_is_read_and_guarded() -> None:
    class Buffered(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("tril", causal(N))

        def masks(self, x: torch.Tensor, *more: Any) -> list[torch.Tensor]:
            return [self.tril[:, :, : x.shape[1], : x.shape[1]]] * 2

    model = Buffered()
    backend = check(model)
    assert bands(backend) == [(None, 0)] * 2
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(2, N, D)
    torch.testing.assert_close(compiled(x), model(x))
    model.tril.fill_(True)
    torch.testing.assert_close(compiled(x), model(x))
    assert bands(backend)[-1] == (None, None)


def test_a_buffer_that_is_itself_an_argument() -> None:
    class Buffered(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("tril", causal(N))

        def masks(self, x: torch.Tensor, *more: Any) -> list[torch.Tensor]:
            return [self.tril] * 2

    assert bands(check(Buffered())) == [(None, 0)] * 2


def test_nothing_outside_is_run_twice() -> None:
    """A mask that is written into an argument of the graph stays outside."""

    class Counting(Model):
        def masks(self, x: torch.Tensor, *more: Any) -> list[torch.Tensor]:
            mask = causal(x.shape[1])
            more[0].add_(1)
            return [mask & (more[0] > 0)] * 2

    torch._dynamo.reset()
    model, backend, counter = Counting(), BodyRewriter(), torch.zeros(N, dtype=torch.long)
    x = torch.randn(2, N, D)
    torch.compile(model, backend=backend, fullgraph=True)(x, counter)
    assert counter.tolist() == [1] * N


def test_no_outer_graph_no_copy() -> None:
    def f(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    backend = BodyRewriter()
    torch._dynamo.reset()
    x = torch.randn(2, H, N, 16)
    torch.testing.assert_close(torch.compile(f, backend=backend)(x, causal(N)), f(x, causal(N)))
    assert [n.op for n in backend.graphs[0].graph.nodes].count("placeholder") == 2


def test_padding_becomes_an_argument() -> None:
    class Padded(Model):
        def masks(self, x: torch.Tensor, *more: Any) -> list[torch.Tensor]:
            return [causal(x.shape[1]) & more[0].bool()[:, None, None, :]] * 2

    pad = torch.ones(2, N, dtype=torch.long)
    pad[1, -4:] = 0
    backend = check(Padded(), pad)
    assert [s.replaced for s in backend.sites] == [True, True], [s.reason for s in backend.sites]
    assert bands(backend) == [(None, 0)] * 2
    assert [s.spec.extras for s in backend.sites if s.spec is not None] == [("padding",)] * 2


def test_a_bias_stays_outside() -> None:
    class Biased(Model):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(1, H, N, N, generator=torch.Generator().manual_seed(0)))

        def masks(self, x: torch.Tensor, *more: Any) -> list[torch.Tensor]:
            return [self.bias * 2.0] * 2

    backend = check(Biased())
    assert all("mul" not in n.name for body in backend.bodies() for n in body.graph.nodes)


def test_parts_that_nobody_uses_are_no_users() -> None:
    """In a body Dynamo leaves the indices that max() gives, though only its values are used."""

    class Shifted(Layer):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            scores = q @ k.mT * 0.3 + mask
            scores = scores - scores.max(dim=-1, keepdim=True).values
            return x + (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)

    backend = check(Additive(Shifted))
    assert [s.replaced for s in backend.sites] == [True, True], [s.reason for s in backend.sites]


@pytest.mark.parametrize("own", [True, False])
def test_a_layer_that_writes_to_its_own_tensors_leaves_the_masks(own: bool) -> None:
    """Experts are added into a tensor made in the layer; one that writes to its argument may change the mask."""

    class Writing(Layer):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            y = super().forward(x, mask)
            if not own:
                assert mask is not None
                return y + mask.mul_(0.0).sum()
            return y + torch.zeros_like(y).index_add_(1, torch.arange(N), y)

    class Model(Additive):
        def masks(self, x: torch.Tensor, *more: Any) -> list[torch.Tensor]:
            return [added(causal(x.shape[1]))] * 2

    backend = BodyRewriter()
    torch._dynamo.reset()
    model, x = Model(Writing), torch.randn(2, N, D)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=own)(x), model(x))
    if own:
        assert bands(backend) == [(None, 0)] * 2
    else:
        assert (None, 0) not in bands(backend)[1:]
