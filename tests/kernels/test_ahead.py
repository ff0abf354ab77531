"""Kernels are compiled while the graph is: the very ones that its calls launch, once, and failures wait for these."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_inductor.ops import ahead, cuda, hopper, hopper_backward
from flash_inductor.ops.launch import Launch
from flash_inductor.spec import MaskSpec
from flash_inductor.testing import make_inputs

from .pretend import compile_for_hopper


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ahead, "_begun", {})
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    yield


class _Kernel:
    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.may_end = error, threading.Event()
        self.events: list[Any] = []

    def warmup(self, *args: Any, grid: Any, **constants: Any) -> None:
        self.may_end.wait(10)
        if self.error:
            raise self.error
        self.events.append(("compiled", args, grid, constants))

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **constants: self.events.append("launched")


def test_a_launch_waits_for_what_was_begun() -> None:
    kernel = _Kernel()
    for _ in range(2):  # two layers
        ahead.begin(kernel, {"N": 1}, (3,), (torch.zeros(1, device="meta"), 5), 0)
    other = threading.Timer(0.2, kernel.may_end.set)
    other.start()
    Launch(kernel, {"N": 1}, (3,), (torch.zeros(1), 6))()
    assert [e if isinstance(e, str) else e[0] for e in kernel.events] == ["compiled", "launched"]
    other.join()


def test_a_launch_waits_for_nothing_else() -> None:
    kernel = _Kernel()
    ahead.begin(kernel, {"N": 1}, (3,), (torch.zeros(1),), 0)
    for constants, dtype in (({"N": 2}, torch.float32), ({"N": 1}, torch.float16)):
        Launch(kernel, constants, (3,), (torch.zeros(1, dtype=dtype),))()
    assert kernel.events == ["launched"] * 2
    kernel.may_end.set()


def test_an_error_is_left_to_the_launch() -> None:
    kernel = _Kernel(RuntimeError("no such instruction"))
    kernel.may_end.set()
    ahead.begin(kernel, {}, (1,), (torch.zeros(1),), 0)
    Launch(kernel, {}, (1,), (torch.zeros(1),))()
    assert kernel.events == ["launched"]


@pytest.mark.parametrize("kind", ["fwd", "bwd"])
def test_the_same_kernels_as_the_call_launches(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ahead, "begin", lambda *given: begun.append(given))
    monkeypatch.setattr(hopper, "processors_of", lambda device: 132)
    query, key, value = make_inputs("bnhd", heads=4, kv_heads=2, q_len=200, head_dim=64, dtype=torch.bfloat16)
    out, lse = torch.empty_like(query), torch.empty(query.shape[:3])
    options = {"scale": None, "is_causal": True, "window_left": 70, "kernel_name": None}
    numbers: dict[str, Any] = {"scale": 0.125, "mask": MaskSpec(-70, 0), "softcap": None}
    tensors: tuple[Tensor | None, ...]
    if kind == "fwd":
        tensors = (query, key, value)
        launches = hopper.forward(query, key, value, out, lse, torch.zeros(1, dtype=torch.int32), **numbers)
    else:
        tensors = (torch.empty_like(out), None, query, key, value, out, lse)
        grads = [torch.empty_like(x) for x in (query, key, value)]
        given: Any = tensors
        launches = hopper_backward.backward(*given, *grads, **numbers, deterministic=False)
        options["grad_mask"] = (True, True, True, False, False)
    cuda.compile_ahead(kind, [None if x is None else x.to("meta") for x in tensors], 0, options)
    assert len(begun) == len(launches) == (1 if kind == "fwd" else 3)
    for (kernel, constants, grid, args, device), launch in zip(begun, launches, strict=True):
        assert (kernel, constants, grid, device) == (launch.kernel, launch.constants, launch.grid, 0)
        assert ahead._key(kernel, constants, args, 0) == ahead._key(kernel, constants, launch.args, 0)
        found = compile_for_hopper(kernel, args, constants).hash
        assert found == compile_for_hopper(kernel, launch.args, constants).hash
