"""The tools that measure: what the detector counts, and that the comparison sees what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from zoo import compare as comparing
from zoo.detector import sites_of_module
from zoo.measure import Coverage, measure
from zoo.registry import build

Tensor = torch.Tensor


def captured(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch.compile(function, backend=keep)(*args)
    (graph,) = graphs
    return graph


def x() -> Tensor:
    return torch.randn(2, 4, 8, 16)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def chain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(torch.softmax(q @ k.mT / 4, -1).to(v.dtype), 0.1) @ v


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -1e9)
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


def two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return chain(sdpa(q, k, v), k, v)


def no_value(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1).sum() + v


def no_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q + k, -1) @ v.mT


@pytest.mark.parametrize(
    ("function", "count"), [(sdpa, 1), (chain, 1), (einsum, 1), (two, 2), (no_value, 0), (no_scores, 0)]
)
def test_detector_counts(function: Callable[..., Any], count: int) -> None:
    assert len(sites_of_module(captured(function, x(), x(), x()))) == count


def test_detector_looks_into_checkpointed_bodies() -> None:
    def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(chain, q, k, v, use_reentrant=False)

    assert len(sites_of_module(captured(checkpointed, *(x().requires_grad_() for _ in range(3))))) == 1


def test_detector_takes_no_projection_for_scores() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.randn(16, 4))

        def forward(self, tokens: Tensor, experts: Tensor) -> Tensor:
            return torch.softmax(tokens @ self.gate, -1) @ experts

    assert not sites_of_module(captured(Router(), torch.randn(8, 16), torch.randn(4, 16)))


def test_sdpa_after_a_graph_break_is_counted() -> None:
    class Broken(nn.Module):
        @torch.compiler.disable
        def hidden(self, q: Tensor) -> Tensor:
            return sdpa(q, q, q)

        def forward(self, q: Tensor) -> Tensor:
            return chain(self.hidden(q), q, q)

    coverage = measure(Broken(), {"q": x()}, train=False)
    assert (coverage.sites, coverage.outside) == (2, 1)
    assert coverage.left[-1]["reason"].startswith("outside of every graph")


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_comparison_sees_a_mask_that_is_dropped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_masks(backend: str | None, coverage: Coverage) -> Callable[..., Any]:
        def compile_graph(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            for node in gm.graph.nodes:
                if "attn_mask" in node.kwargs:
                    node.kwargs = {**node.kwargs, "attn_mask": None}
                    coverage.replaced += 1
            gm.recompile()
            return gm.forward

        return compile_graph

    monkeypatch.setattr(comparing, "pass_then", drop_masks)
    model, inputs = build(name, "sdpa", padding="right")
    result, coverage = comparing.compare(model, inputs, train=True)
    assert coverage.replaced == 2
    assert not result.right and result.gradient > 10 * comparing.TOLERANCE


@pytest.mark.parametrize("parameter", [0, -1])
def test_comparison_sees_one_wrong_gradient(parameter: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = comparing.run

    def run(call: Any, model: nn.Module, inputs: Any, train: bool) -> Any:
        outputs, gradients = real(call, model, inputs, train)
        if call is not model:
            gradients[list(gradients)[parameter]] *= 1.001
        return outputs, gradients

    monkeypatch.setattr(comparing, "run", run)
    model, inputs = build("nanogpt_flash")
    result, _ = comparing.compare(model, inputs, train=True)
    assert not result.right and result.output <= comparing.TOLERANCE


def test_dropout_is_found_and_turned_off() -> None:
    for name in ("gpt2", "nanogpt_eager", "tel", "mha_causal"):
        model, _ = build(name)
        assert comparing.has_dropout(model)
        assert not comparing.has_dropout(comparing.without_dropout(model))
    assert not comparing.has_dropout(build("hand_bshd_einsum_gqa")[0])
