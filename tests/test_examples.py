"""Every example runs here, with few steps; the training ones without Inductor's C++ compiler, which takes a minute."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from flash_inductor.matching.rewrite import rewrite_graph

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if path.stem != "common")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Call an example's main in this process."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    torch.manual_seed(0)
    before = set(sys.modules)

    def call(name: str, *arguments: str) -> int:
        try:
            return importlib.import_module(name).main(list(arguments))
        finally:
            for module in (set(sys.modules) - before) & {"common", *EXAMPLES}:
                del sys.modules[module]

    return call


@pytest.fixture
def rewritten_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile that rewrites the graph, makes its backward, and runs both as they are."""

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        rewrite_graph(gm.graph)
        gm.recompile()
        return aot_eager(gm, inputs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))


@pytest.mark.parametrize(("name", "sites"), [("nanogpt", 2), ("vit", 1), ("gemma2", 1)])
def test_training(
    name: str, sites: int, run: Callable[..., int], rewritten_only: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, "--steps", "3", "--stock", "eager") == 0
    printed = capsys.readouterr().out
    assert f"{sites} of {sites} attention sites replaced" in printed
    assert "equal within rounding" in printed


def test_long_context(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("long_context", "--lengths", "256") == 0
    printed = capsys.readouterr().out
    assert "causal, window 127" in printed
    stock_kept, kept = map(float, printed.split()[-2:])
    assert kept < stock_kept / 2


def test_explicit_op(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explicit_op") == 0
    assert "equal to each document on its own within rounding" in capsys.readouterr().out


def test_z_loss(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("z_loss", "--steps", "30") == 0
    assert "z-loss weight 0.01" in capsys.readouterr().out


def test_context_parallel_on_two_ranks() -> None:
    script = (ROOT / "examples" / "context_parallel").with_suffix(".py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, "--steps", "3"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2: loss" in done.stdout
    assert "first step on 2 ranks and on one, loss and gradients: equal within rounding" in done.stdout


def test_each_example_is_run_and_listed() -> None:
    source, listed = Path(__file__).read_text(), (ROOT / "examples" / "README.md").read_text()
    assert [name for name in EXAMPLES if f'"{name}"' not in source or f"{name}.py" not in listed] == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXAMPLES)
def test_on_a_gpu_unchanged(name: str) -> None:
    done = subprocess.run([sys.executable, ROOT / "examples" / f"{name}.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
