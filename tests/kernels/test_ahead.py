"""Kernels are compiled while the graph is: the very ones that its calls launch, once, and failures wait for these."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import triton
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers

from flash_inductor._compat import compile_workers
from flash_inductor.ops import ahead, cuda, hopper, hopper_backward
from flash_inductor.ops.launch import Launch
from flash_inductor.spec import MaskSpec
from flash_inductor.testing import make_inputs

from .pretend import compile_for_hopper

META = torch.zeros(1, device="meta")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_begun", {})
    monkeypatch.setattr(ahead, "_seen", set())
    monkeypatch.setattr(hopper, "processors_of", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Future[str]]:
    """Futures of what is submitted, which is never done."""
    found: list[Future[str]] = []

    def submit(function: Callable[..., Any], *args: Any) -> Future[str]:
        found.append(Future())
        return found[-1]

    monkeypatch.setattr(compile_workers, "submit", submit)
    return found


@pytest.fixture
def no_workers() -> Iterator[None]:
    """Inductor has started none; what a test starts ends with it."""
    shutdown_compile_workers()
    with inductor_config.patch(compile_threads=2, worker_start_method="subprocess"):
        yield
        shutdown_compile_workers()


class _Kernel:
    fn = SimpleNamespace(__module__="somewhere", __name__="kernel")

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            self.launches += 1

        return launch


def test_a_launch_waits_for_what_was_begun(jobs: list[Future[str]]) -> None:
    kernel = _Kernel()
    for number in (5, 6):  # two layers, one compilation
        ahead.begin(kernel, {"N": 1}, (3,), (META, number), 0)
    assert len(jobs) == 1
    seen: list[int] = []

    def end() -> None:
        seen.append(kernel.launches)
        jobs[0].set_result("hash")

    other = threading.Timer(0.2, end)
    other.start()
    Launch(kernel, {"N": 1}, (3,), (torch.zeros(1), 7))()
    assert seen == [0] and kernel.launches == 1
    other.join()
    ahead.begin(kernel, {"N": 1}, (3,), (META, 5), 0)  # another graph
    assert len(jobs) == 1


@pytest.mark.parametrize(
    ("constants", "args"),
    [({"N": 2}, (torch.zeros(1), 5)), ({"N": 1}, (torch.zeros(1).half(), 5)), ({"N": 1}, (torch.zeros(1), 32))],
    ids=["constant", "dtype", "divisible"],
)
def test_a_launch_waits_for_nothing_else(constants: Any, args: Any, jobs: list[Future[str]]) -> None:
    kernel = _Kernel()
    ahead.begin(kernel, {"N": 1}, (3,), (META, 5), 0)
    Launch(kernel, constants, (3,), args)()
    assert kernel.launches == 1 and len(jobs) == len(ahead._begun) == 1


def test_an_error_is_left_to_the_launch(jobs: list[Future[str]]) -> None:
    kernel = _Kernel()
    ahead.begin(kernel, {}, (1,), (META,), 0)
    jobs[0].set_exception(RuntimeError("no such instruction"))
    Launch(kernel, {}, (1,), (torch.zeros(1),))()
    assert kernel.launches == 1


def test_a_dead_worker_is_waited_for_once(jobs: list[Future[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_PATIENCE", 0.01)
    kernel = _Kernel()
    ahead.begin(kernel, {}, (1,), (META,), 0)
    Launch(kernel, {}, (1,), (torch.zeros(1),))()
    assert kernel.launches == 1 and not ahead._begun


def test_workers_that_are_gone_are_left_to_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(function: Callable[..., Any], *args: Any) -> Future[str]:
        raise RuntimeError("Attempting to use a closed pool")

    monkeypatch.setattr(compile_workers, "submit", submit)
    kernel = _Kernel()
    ahead.begin(kernel, {}, (1,), (META,), 0)
    Launch(kernel, {}, (1,), (torch.zeros(1),))()
    assert kernel.launches == 1 and not ahead._begun


@pytest.mark.usefixtures("no_workers")
def test_no_worker_is_started() -> None:
    assert compile_workers.submit(os.getpid) is None
    assert AsyncCompile.process_pool.cache_info().currsize == 0


def _call(kind: Any) -> tuple[list[Launch], tuple[Tensor | None, ...], dict[str, Any]]:
    """What a call launches, its tensors, and its options."""
    query, key, value = make_inputs("bnhd", heads=4, kv_heads=2, q_len=200, head_dim=64, dtype=torch.bfloat16)
    out, lse = torch.empty_like(query), torch.empty(query.shape[:3])
    options = {"scale": None, "is_causal": True, "window_left": 70, "kernel_name": None}
    numbers: dict[str, Any] = {"scale": 0.125, "mask": MaskSpec(-70, 0), "softcap": None}
    if kind == "fwd":
        counter = torch.zeros(1, dtype=torch.int32)
        launches = hopper.forward(query, key, value, out, lse, counter, **numbers)
        return launches, (query, key, value), options
    given = (torch.empty_like(out), None, query, key, value, out, lse)
    grads = [torch.empty_like(x) for x in (query, key, value)]
    launches = hopper_backward.backward(*given, *grads, **numbers, deterministic=False)
    return launches, given, {**options, "grad_mask": (True, True, True, False, False)}


def _compile_ahead(kind: Any, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> None:
    cuda.compile_ahead(kind, [None if x is None else x.to("meta") for x in tensors], 0, options)


@pytest.mark.parametrize("kind", ["fwd", "bwd"])
def test_the_same_kernels_as_the_call_launches(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ahead, "begin", lambda *given: begun.append(given))
    launches, tensors, options = _call(kind)
    _compile_ahead(kind, tensors, options)
    assert len(begun) == len(launches) == (1 if kind == "fwd" else 3)
    for (kernel, constants, grid, args, device), launch in zip(begun, launches, strict=True):
        assert (kernel, constants, grid, device) == (launch.kernel, launch.constants, launch.grid, 0)
        assert ahead._key(kernel, constants, args, 0) == ahead._key(kernel, constants, launch.args, 0)


@pytest.mark.usefixtures("no_workers")
def test_launches_find_on_disk_what_workers_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    AsyncCompile.process_pool()  # Inductor starts it when it begins with a graph
    with inductor_config.patch(compile_threads=1):
        assert compile_workers.submit(os.getpid) is None
    launches: list[Launch] = []
    for kind in ("fwd", "bwd"):
        called, tensors, options = _call(kind)
        _compile_ahead(kind, tensors, options)
        launches += called
    compiled = [future.result(120) for future in ahead._begun.values()]
    assert len(compiled) == 4 and "TRITON_CACHE_DIR" not in os.environ

    hits: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **found: hits.append(found["cache_hit"]))
    assert [compile_for_hopper(x.kernel, x.args, x.constants).hash for x in launches] == compiled
    # Inductor has loaded a kernel of its own since.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "inductor" / "triton" / "0"))
    assert [compile_for_hopper(x.kernel, x.args, x.constants).hash for x in launches] == compiled
    assert hits == [True] * 8
    # What counts hits can count a miss.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "empty"))
    compile_for_hopper(launches[-1].kernel, launches[-1].args, launches[-1].constants)
    assert hits[8:] == [False]
