"""What is missing or fails: the result is right all the same, or one clear error; and nothing broken stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.conftest import ROOT

from flash_inductor import config
from flash_inductor.ops import attn, cuda
from flash_inductor.ops.choice import Problem
from flash_inductor.testing import make_inputs

STEP = """
    import torch
    import flash_inductor

    def chain(q, k, v):
        return (torch.softmax(3.0 * torch.tanh(q @ k.mT / 12.0), -1) @ v).sin()  # a C++ kernel besides the attention

    flash_inductor.set_config(flash_inductor.Config(strict=True))
    flash_inductor.enable()
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 32, 16, requires_grad=True) for _ in range(3)]
    print("compiling", flush=True)
    out = torch.compile(chain)(*inputs)
    got = [out, *torch.autograd.grad(out.square().sum(), inputs)]
    out = chain(*inputs)
    torch.testing.assert_close(got, [out, *torch.autograd.grad(out.square().sum(), inputs)])
    assert flash_inductor.report().replaced == 1
    print("right")
"""

WITHOUT_TRITON = """
    import importlib.abc, sys

    class Missing(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "triton":
                raise ModuleNotFoundError("No module named 'triton'", name="triton")

    sys.meta_path.insert(0, Missing())
"""


def problem() -> Problem:
    return Problem("fwd", 90, torch.bfloat16, 64, 64, (32, 32), "full", True, None, False)


def test_without_triton(run_python: Callable[..., str]) -> None:
    assert run_python(textwrap.dedent(WITHOUT_TRITON) + textwrap.dedent(STEP)).split() == ["compiling", "right"]


def test_without_a_compiler_the_error_is_torchs_and_eager_works(run_python: Callable[..., str], tmp_path: Path) -> None:
    code = """
        import torch, flash_inductor
        flash_inductor.enable()
        inputs = [torch.randn(1, 2, 8, 16) for _ in range(3)]
        expected = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
        torch.testing.assert_close(flash_inductor.attention(*inputs, is_causal=True), expected)
        try:
            torch.compile(lambda x: x.sin() + flash_inductor.attention(x, x, x))(inputs[0])
        except Exception as error:
            print(type(error).__name__, error)
    """
    (tmp_path / "empty").mkdir()
    out = run_python(code, PATH=str(tmp_path / "empty"), CXX="no-such-compiler")
    assert "InvalidCxxCompiler" in out and "No working C++ compiler found" in out


def start(code: str, tmp_path: Path) -> subprocess.Popen[str]:
    """A process with the caches of ``run_python``, and a compiler that waits while there is a file named slow."""
    compiler = tmp_path / "g++"
    if not compiler.exists():
        compiler.write_text(
            f'#!/bin/sh\nwhile [ -e "{tmp_path}/slow" ]; do touch "{tmp_path}/waits"; sleep 0.1; done\nexec c++ "$@"\n'
        )
        compiler.chmod(0o755)
    env = {
        **os.environ,
        "CXX": str(compiler),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        # Tests that a shell runs in the background ignore SIGINT, and so would this process.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
def test_an_interrupted_compile_leaves_no_broken_cache(how: signal.Signals, tmp_path: Path) -> None:
    """The process dies while a C++ kernel is being compiled; the next one, with its caches, is right."""
    (tmp_path / "slow").touch()
    first = start(STEP, tmp_path)
    try:
        deadline = time.monotonic() + 250
        while not (tmp_path / "waits").exists():
            assert first.poll() is None, first.communicate()[1]
            assert time.monotonic() < deadline, "the compiler was never called"
            time.sleep(0.05)
        os.killpg(first.pid, how)  # as Ctrl-C does: the compiler too, unless a pool of compile workers ignores it
        (tmp_path / "slow").unlink()
        out, err = first.communicate(timeout=120)
    finally:
        if first.poll() is None:
            os.killpg(first.pid, signal.SIGKILL)
            first.wait()
    assert first.returncode != 0 and "right" not in out, err
    second = start(STEP, tmp_path)
    try:
        out, err = second.communicate(timeout=200)
    finally:
        second.kill()
    assert out.split() == ["compiling", "right"], err


class TestGluon:
    """A kernel that this Triton, or this GPU, doesn't take."""

    @pytest.fixture(autouse=True)
    def _not_strict(self) -> Iterator[None]:
        with config.override(strict=False):
            yield

    @pytest.mark.parametrize("error", [RuntimeError("out of resource: shared memory"), AttributeError("gluon.warp")])
    def test_falls_back_with_one_warning(self, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
        calls = []

        def broken(*tensors: Any) -> Any:
            calls.append(1)
            raise error

        inputs = make_inputs()
        call = cuda._or(broken, attn, problem(), "gluon")
        for _ in range(2):
            assert torch.equal(call(*inputs)[0], attn(*inputs)[0])
        assert len(calls) == 1 and len(caplog.records) == 1
        assert "gluon can't compute" in caplog.text and str(error) in caplog.text

    def test_strict_raises(self) -> None:
        def broken(*tensors: Any) -> Any:
            raise RuntimeError("no such instruction")

        with config.override(strict=True), pytest.raises(RuntimeError, match="no such instruction"):
            cuda._or(broken, attn, problem(), "gluon")(*make_inputs())

    def test_out_of_memory_is_raised(self) -> None:
        def full(*tensors: Any) -> Any:
            raise torch.OutOfMemoryError("full")

        with pytest.raises(torch.OutOfMemoryError):
            cuda._or(full, attn, problem(), "gluon")(*make_inputs())
