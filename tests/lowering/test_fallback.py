"""What the templates don't take calls the op, and the package survives a torch whose private names moved."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import sympy
import torch
from fakecuda import Lowered, lower
from harness import qkv
from torch import Tensor

import flash_inductor.config
from flash_inductor.lowering.problem import Band, band_of

attn = torch.ops.flashbwd.attn


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attn(query, key, value, is_causal=True)[0]


def assert_calls_op(lowered: Lowered) -> None:
    assert len(lowered.codes) == 2
    assert "torch.ops.flashbwd.attn.default(" in lowered.codes[0]
    assert "torch.ops.flashbwd.attn_backward.default(" in lowered.codes[1]
    assert "triton_tem" not in lowered.text


def test_cpu() -> None:
    assert_calls_op(lower(causal, qkv(), device="cpu"))


@pytest.mark.parametrize(
    "problem, words", [({"dtype": torch.float64}, "dtype float64"), ({"dim": 20}, "head dim 20"), ({"dim": 264}, "264")]
)
def test_the_op_says_what_no_kernel_takes(problem: dict[str, Any], words: str) -> None:
    """On a real device tracing fails like this already; the lowering must not reach a template."""
    with pytest.raises(torch._inductor.exc.InductorError, match=f"flashbwd::attn: .*{words}"):
        lower(causal, qkv(**problem))


def test_extern_setting() -> None:
    with flash_inductor.config.override(lowering="extern"):
        assert_calls_op(lower(causal, qkv()))


def test_empty_length() -> None:
    assert_calls_op(lower(lambda q, k, v: attn(q, k, v)[0], qkv(q_len=8, kv_len=0)))


def test_symbolic_window() -> None:
    inputs = qkv()
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 2)
    assert_calls_op(lower(lambda q, k, v: attn(q, k, v, window_left=q.shape[2] - 3)[0], inputs))


def test_symbolic_diagonal_other_than_bottom_right() -> None:
    inputs = qkv(q_len=24, kv_len=40)
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 2)
    assert_calls_op(lower(lambda q, k, v: attn(q, k, v, is_causal=True, diagonal=q.shape[2] // 2)[0], inputs))


def test_symbolic_heads() -> None:
    inputs = qkv(heads=4)
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 1)
    assert_calls_op(lower(causal, inputs))


class TestBand:
    """The band of a node in the terms of the templates; the diagonal is up - down (+ Nk - Nq if from_sizes)."""

    n, m = sympy.symbols("n m", positive=True, integer=True)

    @pytest.fixture(autouse=True)
    def _simplify(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("flash_inductor._compat.inductor.simplify", lambda e: sympy.expand(sympy.sympify(e)))

    def band(self, **options: Any) -> Band | None:
        options = {"is_causal": False, "window_left": None, "window_right": None, "diagonal": 0, **options}
        return band_of(**options, q_len=self.n, kv_len=self.m)

    def test_full(self) -> None:
        assert self.band() == Band(None, None)
        assert self.band(diagonal=self.n) == Band(None, None)

    def test_static(self) -> None:
        assert self.band(is_causal=True) == Band(None, 0)
        assert self.band(window_left=sympy.Integer(4), diagonal=3) == Band(4, None, 3, 0)
        assert self.band(window_right=2, diagonal=-3) == Band(None, 2, 0, 3)

    def test_bottom_right(self) -> None:
        assert self.band(is_causal=True, diagonal=self.m - self.n) == Band(None, 0, 0, 0, True)
        assert self.band(is_causal=True, diagonal=self.m - self.n - 2) == Band(None, 0, 0, 2, True)

    def test_symbolic(self) -> None:
        assert self.band(window_left=self.n) is None
        assert self.band(is_causal=True, diagonal=self.m) is None
        assert self.band(is_causal=True, diagonal=self.n - self.m) is None


@pytest.mark.parametrize("module, name", [("select_algorithm", "SymbolicGridFn"), ("lowering", "fallback_handler")])
def test_private_name_gone(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The package imports without that name, says so once, and registers nothing."""
    ours = [m for m in sys.modules if m.startswith(("flash_inductor.lowering", "flash_inductor._compat.inductor"))]
    for loaded in ours:  # put back afterwards, as are the attributes of the packages
        parent, _, attribute = loaded.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], attribute, sys.modules[loaded])
    for loaded in ours:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.delattr(importlib.import_module(f"torch._inductor.{module}"), name)
    lowering = importlib.import_module("flash_inductor.lowering")
    importlib.import_module("flash_inductor.lowering")
    assert not lowering.registered
    messages = [r.getMessage() for r in caplog.records if r.name == "flash_inductor.lowering"]
    assert len(messages) == 1 and name in messages[0] and "extern kernels" in messages[0]
