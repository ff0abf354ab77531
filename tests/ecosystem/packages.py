"""AOTInductor packages, each made, loaded and run in a process of its own: a loader that crashes takes no test with it.

As a script (``python -m ecosystem.packages NAME DEVICE PATH``) it says each of ``STEPS`` that it has done.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from .model import causal, softcapped

STEPS = ("made", "loaded", "ran")
LENGTHS = (32, 48, 7)
_TESTS = Path(__file__).resolve().parents[1]


class Call(nn.Module):
    """A function as the module that torch.export wants."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.function(query, key, value)


def control(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Code without attention, which is packaged and run without the plugin."""
    return torch.sin(query) + key * value


def explicit(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    import flash_inductor

    return flash_inductor.attention(query, key, value, is_causal=True, window_size=(9, None))


def example(length: int = 32, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, 2, length, 16, device=device, dtype=dtype) for _ in range(3))


def export(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    """With a length that isn't known."""
    length = torch.export.Dim("length", min=4, max=512)
    names = ("query", "key", "value")
    return torch.export.export(Call(function), inputs, dynamic_shapes={name: {2: length} for name in names})


class Ending(NamedTuple):
    """How a child ended: what it had done, its return code (below 0 the signal that killed it), its stderr."""

    steps: tuple[str, ...]
    code: int
    errors: str

    @property
    def worked(self) -> bool:
        return self.steps == STEPS and self.code == 0

    def like(self, other: Ending) -> bool:
        """Whether both stopped at the same step in the same way: by an error, or by a signal."""
        return self.steps == other.steps and (self.code < 0) == (other.code < 0)


def watch(*arguments: str, cache: Path) -> Ending:
    """Run Python in a process of its own, with Inductor's caches in ``cache``."""
    paths = [str(_TESTS), str(_TESTS.parent), os.environ.get("PYTHONPATH", "")]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # else each new cache directory starts with a test run of g++
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # only the script itself imports the plugin
    }
    command = [sys.executable, "-X", "faulthandler", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280)
    said = done.stdout.split()
    return Ending(tuple(step for step in STEPS if step in said), done.returncode, done.stderr[-6000:])


def package(function: Callable[..., Tensor], device: str, folder: Path) -> Ending:
    """What becomes of the package of a function of this module."""
    path = folder / f"{function.__name__}.pt2"
    return watch("-m", __name__, function.__name__, device, str(path), cache=folder / "inductor")


def judge(ours: Ending, reference: Ending) -> None:
    """A package of ours must always be made.  It must be loaded and run too, unless the control stops where it does."""
    assert ours.steps[:1] == STEPS[:1], f"no package was made: {ours.code}\n{ours.errors}"
    if not ours.worked and not reference.worked and ours.like(reference):
        pytest.xfail(
            "AOTInductor can't load and run a package without the plugin either here: "
            f"return code {reference.code} after {', '.join(reference.steps) or 'nothing'}"
        )
    assert ours.worked, f"return code {ours.code} after {', '.join(ours.steps)} (control: {reference})\n{ours.errors}"


def _make(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], path: str) -> None:
    torch._inductor.aoti_compile_and_package(export(function, inputs), package_path=path)
    assert Path(path).stat().st_size > 0


def _make_ours(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], path: str) -> None:
    import flash_inductor
    from flash_inductor.report import collect

    with flash_inductor.override(strict=True), flash_inductor.enabled(), collect() as sites:
        _make(function, inputs, path)
    assert [site.replaced for site in sites] == ([] if function is explicit else [True]), sites  # explicit has no site


def _run(compiled: Callable[..., Tensor], function: Callable[..., Tensor], device: str, dtype: torch.dtype) -> None:
    rtol, atol = (1.3e-6, 1e-5) if dtype is torch.float32 else (2**-6, 2**-6)
    for length in LENGTHS:
        inputs = example(length, device, dtype)
        expected = function(*(x.double() for x in inputs)) if function is not explicit else function(*inputs)
        torch.testing.assert_close(compiled(*inputs).double(), expected.double(), rtol=rtol, atol=atol)


def main() -> None:
    name, device, path = sys.argv[1:]
    function = {f.__name__: f for f in (control, causal, softcapped, explicit)}[name]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    make = _make if function is control else _make_ours
    with torch.no_grad():
        make(function, example(device=device, dtype=dtype), path)
        print("made", flush=True)
        compiled = torch._inductor.aoti_load_package(path)
        print("loaded", flush=True)
        _run(compiled, function, device, dtype)
    if device != "cpu":
        torch.cuda.synchronize()
    if function is control:
        assert "flash_inductor" not in sys.modules
    print("ran", flush=True)


if __name__ == "__main__":
    main()
