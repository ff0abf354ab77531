"""Every recognised spelling through the whole of torch.compile on the CPU, Inductor included, in one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_patterns import CASES

import flash_inductor
from flash_inductor.report import collect


def all_spellings(inputs: dict[str, tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    return [CASES[name][0](*tensors) for name, tensors in inputs.items()]


def run(fn: Any, train: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs of every spelling, and in training the gradients of all inputs."""
    inputs = {name: tuple(x.detach().clone().requires_grad_(train) for x in c[1]) for name, c in CASES.items()}
    with torch.set_grad_enabled(train):
        outputs = fn(inputs)
    leaves = [x for tensors in inputs.values() for x in tensors]
    grads = list(torch.autograd.grad([y.sin().sum() for y in outputs], leaves)) if train else []
    return [y.detach() for y in outputs], grads


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_all_spellings_in_one_graph_equal_eager(train: bool) -> None:
    torch._dynamo.reset()
    expected = run(all_spellings, train)
    with flash_inductor.enabled(), flash_inductor.override(strict=True), collect() as sites:
        found = run(torch.compile(all_spellings, fullgraph=True, dynamic=False), train)
    assert len(sites) == len(CASES)
    assert [s.reason for s in sites if not s.replaced] == []
    for kind, ours, theirs in zip(("output", "gradient"), found, expected, strict=True):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, msg=lambda m, k=kind, i=i: f"{k} {i}: {m}")
