"""Small random models of real libraries; the switch is off and Dynamo empty at the start of each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flash_inductor


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    torch.manual_seed(0)
    with flash_inductor.override(strict=True):
        yield
    flash_inductor.disable()


@pytest.fixture
def exact_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention in Transformers rounds the scores to float32; in float64 models it shall not."""
    softmax: Callable[..., torch.Tensor] = F.softmax

    def of_its_input(x: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        return softmax(x, *args, dtype=None if x.dtype is torch.float64 else dtype, **kwargs)

    monkeypatch.setattr(F, "softmax", of_its_input)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor up to and with its pre-grad passes, among them this package's; what comes out runs without C++."""
    from torch._dynamo.backends.debugging import aot_eager
    from torch._inductor import compile_fx

    def rewrite_only(module: torch.fx.GraphModule, inputs: Any, **_: Any) -> Any:
        return aot_eager(compile_fx._recursive_pre_grad_passes(module, inputs), inputs)

    monkeypatch.setattr(compile_fx, "compile_fx", rewrite_only)
