"""Each test starts with the switch off, Dynamo empty, and Inductor's caches off; processes it starts share caches."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch.utils._config_module import _UNSET_SENTINEL

import flash_inductor
from flash_inductor.matching import fusion_pass

ROOT = Path(flash_inductor.__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fusion_pass._said.clear()
    torch.manual_seed(0)
    with (
        flash_inductor.override(strict=True),
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield
    flash_inductor.disable()
    for name in ("pre_grad_custom_pass", "post_grad_custom_pre_pass"):
        forget_assignment(name)


def forget_assignment(name: str) -> None:
    """What a test assigned to this config value; assigning the old value would hide the default from then on."""
    entry = inductor_config._config[name]
    if isinstance(entry.user_override, ContextVar):
        entry.user_override.set(_UNSET_SENTINEL)
    else:
        entry.user_override = _UNSET_SENTINEL


@pytest.fixture
def qkv() -> tuple[torch.Tensor, ...]:
    """query, key, value [1, 2, 32, 16], requiring gradients."""
    return tuple(torch.randn(1, 2, 32, 16, requires_grad=True) for _ in range(3))


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """Run code in a new process with the test's Inductor caches; gives its stdout."""

    def run(code: str, *, path: Path = ROOT, **environ: str) -> str:
        inherited = os.environ.get("PYTHONPATH")
        env = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
            "TORCHINDUCTOR_VEC_ISA_OK": "1",  # else each new cache directory starts with a test run of g++
            "PYTHONPATH": os.pathsep.join([str(path), *([inherited] if inherited else [])]),
            **environ,
        }
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], env=env, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
