"""Threads, forked and spawned processes, compile workers, resets, pickles, and what is in the cache keys."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import flash_inductor
from flash_inductor.matching.fusion_pass import FUSION, KEY
from flash_inductor.report import collect

from .model import causal, make_qkv, softcapped, step

COUNTS = """
    import json, sys, torch
    import flash_inductor
    from torch._dynamo.utils import counters

    def chain(q, k, v):
        return torch.softmax(3.0 * torch.tanh(q @ k.mT / 12.0), -1) @ v

    flash_inductor.set_config(flash_inductor.Config(strict=True, **{config}))
    flash_inductor.enable()
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 32, 16) for _ in range(3))
    torch.testing.assert_close(torch.compile(chain)(q, k, v), chain(q, k, v))
    print(json.dumps([counters["inductor"][f"fxgraph_cache_{{x}}"] for x in ("hit", "miss", "bypass")]))
"""


def hit_miss_bypass(run_python: Callable[..., str], **config: Any) -> list[int]:
    return json.loads(run_python(COUNTS.format(config=config)).splitlines()[-1])


def test_another_setting_is_not_served_code_from_the_cache(run_python: Callable[..., str]) -> None:
    """``integration/test_caches.py`` shows the hit of an equal process, and the miss after a change of the sources."""
    assert hit_miss_bypass(run_python) == [0, 1, 0]
    assert hit_miss_bypass(run_python, kernel="triton") == [0, 1, 0]


def test_the_uuid_follows_the_switch_and_every_setting() -> None:
    keys = [FUSION.uuid(), KEY.uuid()]
    flash_inductor.enable()
    assert FUSION.uuid() != keys[0] and KEY.uuid() != keys[1]
    flash_inductor.disable()
    changes: dict[str, Any] = {
        "cpu": "off",
        "lowering": "extern",
        "kernel": "gluon",
        "kernel_options": {"fwd": {"num_warps": 8}},
        "table": "off",
        "include": "model.*",
        "exclude": "model.*",
        "max_mask_elements": 7,
        "log_sites": True,
        "check_stock_patterns": False,
        "strict": not flash_inductor.get_config().strict,
    }
    missing = set(vars(flash_inductor.Config())) - {"enable"} - set(changes)  # the switch itself was asked for above
    assert not missing, f"add {missing} to this test"
    for name, value in changes.items():
        with flash_inductor.override(**{name: value}):
            assert FUSION.uuid() != keys[0] and KEY.uuid() != keys[1], name
    assert [FUSION.uuid(), KEY.uuid()] == keys


@pytest.mark.parametrize("made", [FUSION, KEY], ids=["fusion", "key"])
def test_a_pickled_pass_says_what_its_uuid_says(made: Any) -> None:
    """Its pickle goes into cache keys (torch 2.11); a copy for another thread is the pass itself."""
    assert pickle.loads(pickle.dumps(made)) == made.uuid()
    flash_inductor.enable()
    assert pickle.loads(pickle.dumps(made)) == made.uuid()
    assert copy.deepcopy(made) is made


def test_reset_compiles_and_rewrites_again() -> None:
    inputs = make_qkv()
    expected = step(causal, inputs)
    with flash_inductor.enabled(), collect() as sites:
        torch.testing.assert_close(step(torch.compile(causal), inputs), expected)
        torch.compiler.reset()
        compiled = torch.compile(causal)
        step(compiled, inputs)
        torch.testing.assert_close(step(compiled, inputs), expected)  # nothing new without a reset
    assert [s.replaced for s in sites] == [True] * 2


def test_threads_that_compile_and_run_at_once() -> None:
    """Each its own graphs, both at the same time; every result is that of eager."""
    inputs = make_qkv()
    functions = [causal, softcapped]
    expected = [[x if x is None else x.clone() for x in step(f, inputs)] for f in functions]
    barrier, errors = threading.Barrier(2, timeout=60), []

    def work(index: int) -> None:
        try:
            mine = [x.detach().clone().requires_grad_() for x in inputs]
            compiled = torch.compile(functions[index])
            for _ in range(3):
                barrier.wait()
                torch.testing.assert_close(step(compiled, mine), expected[index])
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    with flash_inductor.enabled():
        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=300)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors, errors


class Items(Dataset):
    """Worker processes compute with the op, and with the switch that they got from their parent or set."""

    def __init__(self, enable: bool) -> None:
        self.enable = enable

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[Tensor, bool, bool]:
        inherited = flash_inductor.is_enabled()
        if self.enable:
            flash_inductor.enable()
        inputs = [torch.full((1, 1, 4, 8), float(i + index)) for i in range(3)]
        out = flash_inductor.attention(*inputs, is_causal=True)
        compiled = torch.compile(causal, backend="eager")(*inputs)
        return out, inherited, torch.equal(out, compiled)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader(method: str) -> None:
    """A forked worker has the parent's switch, a spawned one its own; the parent's compiled code goes on."""
    inputs = make_qkv()
    compiled = torch.compile(causal)
    with flash_inductor.enabled():
        before = step(compiled, inputs)
        loader = DataLoader(Items(enable=method == "spawn"), num_workers=1, multiprocessing_context=method, timeout=120)
        for index, (out, inherited, agrees) in enumerate(loader):
            torch.testing.assert_close(out[0], torch.full((1, 1, 4, 8), 2.0 + index))
            assert agrees.item()
            if index == 0:
                assert inherited.item() is (method == "fork")
        torch.testing.assert_close(step(compiled, inputs), before)


WORKERS = """
    import torch, flash_inductor
    import torch._inductor.config as config
    from torch._inductor import async_compile
    flash_inductor.set_config(flash_inductor.Config(strict=True))
    flash_inductor.enable()
    config.compile_threads = 2
    config.worker_start_method = "subprocess"
    async_compile.AsyncCompile.warm_pool()
    def f(q, k, v):
        return torch.softmax(3.0 * torch.tanh(q @ k.mT / 12.0), -1) @ v * 2
    q, k, v = (torch.randn(1, 2, 32, 16, requires_grad=True) for _ in range(3))
    out = torch.compile(f)(q, k, v)
    torch.testing.assert_close(out, f(q, k, v))
    out.sum().backward()
    print(flash_inductor.report().replaced)
"""


def test_a_pool_of_compile_workers(run_python: Callable[..., str]) -> None:
    assert run_python(WORKERS).split() == ["1"]
