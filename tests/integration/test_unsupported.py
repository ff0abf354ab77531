"""On a torch that isn't supported: one clear warning, and what torch.compile gives without the package."""

import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_inductor
from flash_inductor import config
from flash_inductor._compat import buffers, hooks, unsupported
from flash_inductor.matching import fusion_pass
from flash_inductor.report import collect

from .conftest import causal

# What the passes use of torch's private parts while something is compiled.
USED = [
    *(
        name
        for name, function in inspect.getmembers(hooks, inspect.isfunction)
        if function.__module__ == hooks.__name__
        and not name.startswith("_")
        # only imports: `explain` alone; or no private name at all
        and name not in ("when_imported", "is_imported", "original", "tracing_aside", "register_backend")
    ),
]


@pytest.fixture(autouse=True)
def known_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(unsupported, "_why", None)
    monkeypatch.setattr(fusion_pass, "_said", set())
    with config.override(strict=False):
        yield
    monkeypatch.undo()
    flash_inductor.disable()


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 32, 16, generator=generator) for _ in range(3)]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage() for r in caplog.records if r.name.startswith("flash_inductor") and r.levelno >= logging.WARNING
    ]


def compiled(backend: str) -> torch.Tensor:
    torch._dynamo.reset()
    return torch.compile(causal, backend=backend)(*inputs())


@pytest.mark.parametrize("backend", ["inductor", "flash_inductor"])
@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cu117"])
def test_too_old(version: str, backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    expected = compiled("inductor")
    monkeypatch.setattr(torch, "__version__", version)
    flash_inductor.enable()
    flash_inductor.enable()
    with collect() as sites:
        assert torch.equal(compiled(backend), expected)
    assert sites == []
    (words,) = warnings_of(caplog)
    assert f"torch {version} is too old" in words and "2.11 or newer" in words
    with pytest.raises(NotImplementedError, match="too old"):
        flash_inductor.explain(causal, *inputs())


def test_versions_that_are_not() -> None:
    for version in ("2.11.0", "2.13.0+cpu", "2.15.0a0+git1234", "3.0.0", "an own build"):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch, "__version__", version)
            assert not unsupported.is_unsupported(), version


def moved(*args, **kwargs):
    raise AttributeError("module 'torch._inductor' has no attribute 'moved'")


@pytest.mark.parametrize("name", USED)
def test_a_private_name_moved(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Whichever of the functions on private names fails, the model runs, and one warning at most says so."""
    expected = compiled("inductor")
    backend = "flash_inductor" if name in ("inductor_backend", "subgraphs") else "inductor"
    if name == "inductor_backend":
        original = hooks.inductor_backend

        def second_way(*args: Any) -> Any:  # torch 2.15 uses the name itself while it compiles
            with monkeypatch.context() as patch:
                patch.delattr(torch, "_TorchCompileInductorWrapper")
                return original(*args)

        monkeypatch.setattr(hooks, name, second_way)
    else:
        monkeypatch.setattr(hooks, name, moved)
    flash_inductor.enable()
    torch.testing.assert_close(compiled(backend), expected)
    torch.testing.assert_close(compiled(backend), expected)
    said = warnings_of(caplog)
    assert len(said) <= 1
    if said:
        assert torch.__version__ in said[0] and "moved" in said[0] and "runs as without it" in said[0]
        assert unsupported.is_unsupported()


def test_names_of_the_compile_path_are_all_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The test above would pass for ever if no function were reached.
    reached = set()
    for name in USED:
        original = getattr(hooks, name)
        monkeypatch.setattr(hooks, name, lambda *a, _f=original, _n=name, **k: (reached.add(_n), _f(*a, **k))[1])
    flash_inductor.enable()
    compiled("inductor")
    compiled("flash_inductor")
    flash_inductor.disable()
    flash_inductor.compose(None)
    assert reached == set(USED)


@pytest.mark.parametrize("name", ["buffer_value", "guard_unchanged"])
def test_a_private_name_behind_buffers_moved(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(32, 32, dtype=torch.bool).tril())

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)

    model = Model()
    monkeypatch.setattr(buffers, name, moved)
    flash_inductor.enable()
    torch.testing.assert_close(torch.compile(model)(*inputs()), model(*inputs()))
    assert len(warnings_of(caplog)) == 1


def test_strict_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "add_pass", moved)
    with config.override(strict=True), pytest.raises(AttributeError, match="moved"):
        flash_inductor.enable()


def test_composed_passes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(graph: torch.fx.Graph) -> None: ...

    assert flash_inductor.compose(mine) is not mine
    monkeypatch.setattr(hooks, "join", moved)
    assert flash_inductor.compose(mine) is mine


HIDE = """
import importlib.abc, logging, sys
class Hider(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "flash_inductor._compat.{name}":
            raise ImportError("cannot import name 'moved' from 'torch._inductor'")
sys.meta_path.insert(0, Hider())
import torch, flash_inductor
flash_inductor.enable()
x = torch.ones(1, 2, 32, 16)
attention = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
out = torch.compile(attention)(x, x, x)
assert torch.equal(out, x), out
"""


@pytest.mark.parametrize("name", ["pass_chain", "buffers", "inductor"])
def test_a_module_with_private_names_cannot_be_imported(name: str, tmp_path: Path) -> None:
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}  # what is cached isn't lowered again
    command = [sys.executable, "-c", HIDE.format(name=name)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot import name 'moved'") >= 1, done.stderr
    assert "could not install itself" not in done.stderr
