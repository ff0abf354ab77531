"""Kernels are compiled while the graph is: the very ones that its calls launch, once, and failures wait for these."""

from __future__ import annotations

import os
import signal
import threading
import time
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
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler.compiler import make_backend
from triton.runtime import driver

from flash_inductor._compat import compile_workers
from flash_inductor.ops import ahead, choice, cuda, hopper, hopper_backward
from flash_inductor.ops.launch import Launch
from flash_inductor.spec import MaskSpec
from flash_inductor.testing import make_inputs

from .pretend import compile_for_hopper

META = torch.zeros(1, device="meta")
UNALIGNED = torch.zeros(2)[1:]
PTXAS = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")  # since Triton 3.9 Hopper's is the second


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_begun", {})
    monkeypatch.setattr(ahead, "_seen", set())
    monkeypatch.setattr(hopper, "processors_of", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(choice, "device_limits", lambda index: (90, 232448))


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Future[str]]:
    """Futures of what is submitted, which is never done."""
    found: list[Future[str]] = []

    def submit(function: Callable[..., Any], *args: Any) -> Future[str]:
        found.append(Future())
        return found[-1]

    monkeypatch.setattr(compile_workers, "submit", submit)
    monkeypatch.setattr(compile_workers, "running", lambda: True)
    monkeypatch.setattr(compile_workers, "ready", lambda: True)
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
    cache_key = "source"

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            self.launches += 1

        return launch


def test_a_launch_waits_for_what_was_begun(jobs: list[Future[str]]) -> None:
    kernel = _Kernel()
    for number in (5, 6):  # two layers, one compilation
        ahead.begin(kernel, {"N": 1}, (META, number), 90, 0)
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
    ahead.begin(kernel, {"N": 1}, (META, 5), 90, 0)  # another graph
    assert len(jobs) == 1


@pytest.mark.parametrize(
    ("constants", "args"),
    [
        ({"N": 2}, (torch.zeros(1), 5)),
        ({"N": 1}, (torch.zeros(1).half(), 5)),
        ({"N": 1}, (UNALIGNED, 5)),
        ({"N": 1}, (torch.zeros(1), 32)),
        ({"N": 1}, (torch.zeros(1), 2**31 + 1)),
    ],
    ids=["constant", "dtype", "alignment", "divisible", "long"],
)
def test_a_launch_waits_for_nothing_else(constants: Any, args: Any, jobs: list[Future[str]]) -> None:
    kernel = _Kernel()
    ahead.begin(kernel, {"N": 1}, (META, 5), 90, 0)
    Launch(kernel, constants, (3,), args)()
    assert kernel.launches == 1 and len(jobs) == len(ahead._begun) == 1


def test_an_error_is_left_to_the_launch(jobs: list[Future[str]]) -> None:
    kernel = _Kernel()
    ahead.begin(kernel, {}, (META,), 90, 0)
    jobs[0].set_exception(RuntimeError("no such instruction"))
    Launch(kernel, {}, (1,), (torch.zeros(1),))()
    assert kernel.launches == 1


def test_a_dead_worker_is_waited_for_once(jobs: list[Future[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_PATIENCE", 0.01)
    kernel = _Kernel()
    for n in range(2):
        ahead.begin(kernel, {"N": n}, (META,), 90, 0)
    Launch(kernel, {"N": 0}, (1,), (torch.zeros(1),))()
    assert kernel.launches == 1 and not ahead._begun


def test_workers_that_still_start_are_not_waited_for(jobs: list[Future[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_workers, "ready", lambda: False)
    kernel = _Kernel()
    ahead.begin(kernel, {}, (META,), 90, 0)
    Launch(kernel, {}, (1,), (torch.zeros(1),))()
    assert kernel.launches == 1 and not ahead._begun


@pytest.mark.usefixtures("no_workers")
def test_no_worker_is_started() -> None:
    _, tensors, options = _call("fwd")
    _compile_ahead("fwd", tensors, options)
    assert not compile_workers.running() and not ahead._seen
    assert AsyncCompile.process_pool.cache_info().currsize == 0


@pytest.mark.parametrize("capability", [80, 100])
def test_nothing_is_begun_for_other_gpus(
    capability: int, jobs: list[Future[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "device_limits", lambda index: (capability, 232448))
    _, tensors, options = _call("fwd")
    _compile_ahead("fwd", tensors, options)
    assert not jobs


@pytest.mark.usefixtures("no_workers")
def test_workers_that_fail_or_are_gone_are_left_to_the_launch() -> None:
    pool = AsyncCompile.process_pool()
    kernel = _Kernel()
    with inductor_config.patch(compile_threads=1):
        ahead.begin(kernel, {}, (META,), 90, 0)
    assert not ahead._begun
    ahead.begin(kernel, {}, (META,), 90, 0)  # no module is named so
    (failing,) = ahead._begun.values()
    assert "No module named 'somewhere'" in str(failing.exception(120))
    Launch(kernel, {}, (1,), (torch.zeros(1),))()
    pool.shutdown()
    ahead.begin(kernel, {"N": 2}, (META,), 90, 0)
    Launch(kernel, {"N": 2}, (1,), (torch.zeros(1),))()
    assert kernel.launches == 2 and not ahead._begun


@pytest.mark.usefixtures("no_workers")
def test_a_killed_pool_is_not_waited_for() -> None:
    pool = AsyncCompile.process_pool()
    assert compile_workers.submit(os.getpid).result(120)
    pool.process.send_signal(signal.SIGSTOP)  # what is submitted stays
    kernel = _Kernel()
    ahead.begin(kernel, {}, (META,), 90, 0)
    killer = threading.Timer(0.2, pool.process.kill)
    killer.start()
    begin = time.monotonic()
    Launch(kernel, {}, (1,), (torch.zeros(1),))()
    assert kernel.launches == 1 and not ahead._begun
    assert time.monotonic() - begin < ahead._PATIENCE / 2
    killer.join()


def _call(kind: Any, diagonal: int = 0) -> tuple[list[Launch], tuple[Tensor | None, ...], dict[str, Any]]:
    """What a call launches, its tensors, and its options."""
    query, key, value = make_inputs("bnhd", heads=4, kv_heads=2, q_len=200, head_dim=64, dtype=torch.bfloat16)
    out, lse = torch.empty_like(query), torch.empty(query.shape[:3])
    options = {"scale": None, "is_causal": True, "window_left": 70, "diagonal": diagonal, "kernel_name": None}
    numbers: dict[str, Any] = {"scale": 0.125, "mask": MaskSpec(diagonal - 70, diagonal), "softcap": None}
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


# The first query sees nothing: what is launched reads lse from the second on, which isn't aligned.
CALLS = [("fwd", 0), ("bwd", 0), ("bwd", -1)]


@pytest.mark.parametrize(("kind", "diagonal"), CALLS)
def test_the_same_kernels_as_the_call_launches(kind: Any, diagonal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ahead, "begin", lambda *given: begun.append(given))
    monkeypatch.setattr(compile_workers, "running", lambda: True)
    launches, tensors, options = _call(kind, diagonal)
    _compile_ahead(kind, tensors, options)
    assert len(begun) == len(launches) == (1 if kind == "fwd" else 3)
    for (kernel, constants, args, *device), launch in zip(begun, launches, strict=True):
        assert (kernel, constants, device) == (launch.kernel, launch.constants, [90, 0])
        assert ahead._key(kernel, constants, args, 0) == ahead._key(kernel, constants, launch.args, 0)


def _other_ptxas(path: Path) -> str:
    """Triton's own under another version."""
    own = nvidia.get_ptxas(90).path
    path.write_text(f'#!/bin/sh\n{own} "$@"\n[ "$1" != --version ] || echo {path.name}\n')
    path.chmod(0o755)
    return str(path)


def _state(folder: str, ptxas: str | None = None) -> tuple[dict[str, str], str, dict[str, Any], Any]:
    """In a worker, as Inductor's own jobs have left it: what it compiles these in.  Each worker is asked once."""
    (Path(folder) / str(os.getpid())).touch()
    while len(list(Path(folder).iterdir())) < 2:
        time.sleep(0.05)
    if ptxas is not None:
        os.environ.update(dict.fromkeys(PTXAS, ptxas))
        nvidia.get_ptxas_version.cache_clear()
        triton.knobs.nvidia.libdevice_path = triton.knobs.nvidia.libdevice_path or __file__
    version = make_backend(GPUTarget("cuda", 90, 32)).hash()
    return dict(os.environ), version, dict(vars(triton.knobs.nvidia)), driver._active


def _states(folder: Path, ptxas: str | None = None) -> list[Any]:
    folder.mkdir()
    found = [compile_workers.submit(_state, str(folder), ptxas) for _ in range(2)]
    return sorted((future.result(120) for future in found), key=repr)


@pytest.mark.usefixtures("no_workers")
def test_launches_find_on_disk_what_workers_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    AsyncCompile.process_pool()  # Inductor starts it when it begins with a graph
    before = _states(tmp_path / "before", _other_ptxas(tmp_path / "of_workers"))
    assert all("of_workers" in version for _, version, _, _ in before)
    launches: list[Launch] = []
    for kind, diagonal in CALLS:
        if diagonal:  # this process has asked for the version already: Triton goes on to use the old one
            later = _other_ptxas(tmp_path / "later")
            for name in PTXAS:
                monkeypatch.setenv(name, later)
        called, tensors, options = _call(kind, diagonal)
        _compile_ahead(kind, tensors, options)
        launches += called
    compiled = {key: future.result(120) for key, future in ahead._begun.items()}
    assert len(compiled) == 5 and "TRITON_CACHE_DIR" not in os.environ  # the backward calls differ in the first kernel
    assert _states(tmp_path / "after") == before

    hits: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **found: hits.append(found["cache_hit"]))

    def launch(x: Launch) -> None:
        found = compile_for_hopper(x.kernel, x.args, x.constants).hash
        assert found == compiled[ahead._key(x.kernel, x.constants, x.args, 0)]

    for x in launches:
        launch(x)
    # Inductor has loaded a kernel of its own since.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "inductor" / "triton" / "0"))
    for x in launches:
        launch(x)
    assert hits == [True] * 14
    # What counts hits can count a miss.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "empty"))
    launch(launches[-1])
    assert hits[14:] == [False]


@pytest.mark.parametrize("what", ["surroundings", "source"])
def test_what_no_launch_would_find_is_not_compiled(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (launch,), _, _ = _call("fwd")
    where = compile_workers.surroundings(90, 0)
    module, name = launch.kernel.fn.__module__, launch.kernel.fn.__name__
    job = ahead._Job(module, name, launch.kernel.cache_key, launch.constants, launch.args, where)
    if what == "source":
        job = job._replace(source="another version of the file")
    else:
        job = job._replace(where=where._replace(ptxas="10.9", environment={"TRITON_PTXAS_PATH": "nowhere"}))
    before = dict(os.environ), driver._active
    with pytest.raises(RuntimeError, match="another kernel" if what == "source" else "wouldn't be found"):
        ahead._compile(job)
    assert before == (dict(os.environ), driver._active) and not list(tmp_path.iterdir())
