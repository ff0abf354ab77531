"""include and exclude: which sites are rewritten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flash_inductor
from flash_inductor import get_config, override


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


class Model(nn.Module):
    """Two layers, the second checkpointed, and a site of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        return own(checkpoint(second, first(x), use_reentrant=False))


def own(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads)


ALL = {"layers.0.attention", "layers.1.attention", None}


def example() -> Tensor:
    return torch.randn(1, 64, 16, requires_grad=True)


def replaced(**settings: Any) -> set[str | None]:
    with override(**settings):
        found = flash_inductor.explain(Model(), example())
    assert {site.module for site in found.sites} == ALL
    for site in found.sites:
        assert site.replaced or site.reason
    return {site.module for site in found.sites if site.replaced}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ALL),
        ({"include": "*"}, ALL),
        ({"include": "layers.*"}, ALL - {None}),
        ({"include": "layers.1"}, {"layers.1.attention"}),  # a module around it
        ({"include": "Attention"}, ALL - {None}),
        ({"include": "Block"}, ALL - {None}),
        ({"include": "attention"}, set()),  # no part of a path
        ({"include": "test_scope.py:* in own"}, {None}),
        ({"include": ("layers.0*", "*in own")}, {"layers.0.attention", None}),
        ({"exclude": "Attention"}, {None}),
        ({"exclude": "layers.0.attention"}, {"layers.1.attention", None}),
        ({"exclude": "test_scope.py*"}, set()),
        ({"include": "Block", "exclude": "layers.1"}, {"layers.0.attention"}),
        ({"include": "layers.0", "exclude": "Block"}, set()),
    ],
    ids=lambda x: str(sorted(x, key=str) if isinstance(x, set) else x),  # a set has no order of its own
)
def test_which_sites(settings: dict[str, Any], expected: set[str | None]) -> None:
    assert replaced(**settings) == expected


def test_the_reason_names_the_pattern_and_the_site() -> None:
    with override(exclude=("nothing", "*.0.attention"), include="layers.*"):
        reasons = {site.module: site.reason for site in flash_inductor.explain(Model(), example()).sites}
    assert reasons["layers.1.attention"] is None
    assert "'*.0.attention' of exclude" in str(reasons["layers.0.attention"])
    assert "include=['layers.*']" in str(reasons[None]) and "in own'" in str(reasons[None])


def test_what_is_left_out_is_computed_as_written() -> None:
    torch.manual_seed(0)
    x = example()
    with flash_inductor.enabled(exclude="layers.0*"):
        compiled = torch.compile(Model(), fullgraph=True)
        out = compiled(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
    sites = flash_inductor.report().sites[-3:]
    assert {site.module for site in sites if site.replaced} == ALL - {"layers.0.attention"}
    expected = Model()(x)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grad, expected_grad)


def test_enable_sets_the_patterns_and_enabled_puts_them_back() -> None:
    before = get_config()
    try:
        flash_inductor.enable(include=["a*", "b"], exclude="c")
        assert (get_config().include, get_config().exclude) == (("a*", "b"), ("c",))
        with flash_inductor.enabled(include=()):
            assert (get_config().include, get_config().exclude) == ((), ("c",))
        assert get_config().include == ("a*", "b")
        flash_inductor.enable(exclude=())
        assert (get_config().include, get_config().exclude) == (("a*", "b"), ())
    finally:
        flash_inductor.disable()
        flash_inductor.set_config(before)
