"""Inductor's own attention patterns see what the matcher left alone, and must not take what they don't mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch.fx.experimental.proxy_tensor import make_fx

import flash_inductor
from flash_inductor._compat import stock_patterns
from flash_inductor.matching import fusion_pass, install

Fn = Callable[..., torch.Tensor]


def heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.permute(0, 2, 1, 3) for x in tensors]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.matmul(q, k.transpose(-2, -1)).div(3.0), dim=-1).matmul(v)


def with_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = heads_first(q, k, v)
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    mask = mask.masked_fill(~mask, -float("inf"))
    return torch.softmax((q @ k.transpose(-2, -1)) / 3.0 + mask.to(q.dtype), dim=-1) @ v


def other_dim(dim: int) -> Fn:
    return lambda q, k, v: torch.softmax(torch.matmul(q, k.transpose(-2, -1)).div(3.0), dim=dim).matmul(v)


def permuted(*dims: int) -> Fn:
    return lambda q, k, v: torch.matmul(q, k.permute(dims)).div(3.0).softmax(dim=-1).matmul(v)


WRONG = {"softmax over queries": other_dim(-2), "softmax over heads": other_dim(1)} | {
    f"key permuted {dims}": permuted(*dims) for dims in ((0, 2, 3, 1), (1, 0, 3, 2), (3, 1, 2, 0), (2, 0, 1, 3))
}


def fused(fn: Fn, *args: torch.Tensor) -> int:
    """How many attentions Inductor's patterns find in an inference graph; its result must be eager's."""
    gm = make_fx(fn, decomposition_table=select_decomp_table(), tracing_mode="fake")(*args)
    counters.clear()
    joint_graph_passes(gm)
    torch.testing.assert_close(gm(*args), fn(*args), atol=1e-5, rtol=1e-5)
    return counters["inductor"]["fuse_attention"]


@pytest.fixture
def cube() -> list[torch.Tensor]:
    """Query, key and value of which every permutation has the same shape."""
    return [torch.randn(4, 4, 4, 4) for _ in range(3)]


@pytest.mark.parametrize("fn", WRONG.values(), ids=WRONG)
def test_lookalikes_are_left_alone(fn: Fn, cube: list[torch.Tensor]) -> None:
    with flash_inductor.enabled():
        assert fused(fn, *cube) == 0


@pytest.mark.parametrize("fn", [plain, with_mask])
def test_what_is_right_is_still_taken(fn: Fn, cube: list[torch.Tensor]) -> None:
    found = fused(fn, *cube)
    with flash_inductor.enabled():
        assert fused(fn, *cube) == found
    assert found == 1 or fn is with_mask


def test_right_shapes_that_are_not_square_are_taken() -> None:
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    with flash_inductor.enabled():
        assert fused(plain, q, k, v) == 1


def test_five_dims_are_left_alone() -> None:
    q, k, v = (torch.randn(2, 3, 2, 4, 8) for _ in range(3))
    with flash_inductor.enabled():
        gm = make_fx(plain, decomposition_table=select_decomp_table(), tracing_mode="fake")(q, k, v)
        joint_graph_passes(gm)
        torch.testing.assert_close(gm(q, k, v), plain(q, k, v))


def test_the_setting_and_the_switch(cube: list[torch.Tensor]) -> None:
    """Without them Inductor does what it does; a torch that checks by itself has nothing to switch."""

    def found() -> bool:
        gm = make_fx(WRONG["softmax over queries"], decomposition_table=select_decomp_table(), tracing_mode="fake")(
            *cube
        )
        counters.clear()
        joint_graph_passes(gm)
        return counters["inductor"]["fuse_attention"] > 0

    stock = found()
    with flash_inductor.enabled():
        assert not found()
        with flash_inductor.override(check_stock_patterns=False):
            assert found() == stock
    assert found() == stock
    with install.held_off():  # as in backend="flash_inductor"
        assert not found()


def test_the_cache_key_says_whether_it_is_checked() -> None:
    keys = [fusion_pass.KEY.uuid()]
    with flash_inductor.enabled():
        keys.append(fusion_pass.KEY.uuid())
        with flash_inductor.override(check_stock_patterns=False):
            keys.append(fusion_pass.KEY.uuid())
    assert len(set(keys)) == 3


def test_a_check_that_is_not_understood_refuses() -> None:
    def check(match: Any) -> bool:
        return True

    assert stock_patterns.without_traced_pattern(check) is None  # type: ignore[arg-type]
    active = True
    guarded = stock_patterns.Exactly(check, None, lambda: active)
    assert guarded(None) is False
    active = False
    assert guarded(None) is True


def test_a_pattern_that_cannot_be_traced_refuses() -> None:
    def broken(match: Any) -> bool:
        raise IndexError("three dims")

    assert stock_patterns.Exactly(lambda match: True, broken, lambda: True)(None) is False
