"""torch.export and AOTInductor: the exported program, and the package that is compiled from it, loaded and run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import aoti_compile_and_package, aoti_load_package

import flash_inductor
from flash_inductor.report import collect

from .model import Model, causal, softcapped

LENGTHS = (32, 48, 7)


class Call(nn.Module):
    """A function as the module that torch.export wants."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.function(query, key, value)


def explicit(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return flash_inductor.attention(query, key, value, is_causal=True, window_size=(9, None))


def example(length: int = 32, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, 2, length, 16, device=device, dtype=dtype) for _ in range(3))


def export(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    """With a length that isn't known."""
    length = torch.export.Dim("length", min=4, max=512)
    names = ("query", "key", "value")
    return torch.export.export(Call(function), inputs, dynamic_shapes={name: {2: length} for name in names})


def test_export_leaves_models_as_they_are() -> None:
    """The rewrite belongs to the compile: a program is portable, whether the plugin is on or not."""
    model, x = Model(), torch.randn(2, 32, 32)
    with flash_inductor.enabled():
        program = torch.export.export(model, (x,))
    targets = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert not any("flashbwd" in t for t in targets)
    torch.testing.assert_close(program.module()(x), model(x))


def test_an_explicit_call_survives_export_saving_and_loading(tmp_path: Path) -> None:
    torch.export.save(export(explicit, example()), tmp_path / "program.pt2")
    program = torch.export.load(tmp_path / "program.pt2")
    assert "flashbwd.attn.default" in {str(n.target) for n in program.graph.nodes}
    for length in LENGTHS:
        inputs = example(length)
        torch.testing.assert_close(program.module()(*inputs), explicit(*inputs))


def test_a_compiled_export_is_rewritten() -> None:
    """The pass then sees ATen's overloads instead of torch's functions."""
    inputs = example()
    program = export(softcapped, inputs)
    with flash_inductor.enabled(), collect() as sites:
        out = torch.compile(program.module())(*inputs)
    assert [s.replaced for s in sites] == [True]
    torch.testing.assert_close(out, softcapped(*inputs))


def package(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], path: Path) -> Callable[..., Tensor]:
    with flash_inductor.enabled(), torch.no_grad(), collect() as sites:
        aoti_compile_and_package(export(function, inputs), package_path=str(path))
    assert all(s.replaced for s in sites)
    return aoti_load_package(str(path))


def test_a_package_runs_on_the_cpu(tmp_path: Path) -> None:
    """There the op is called, through C++ that must be given every integer of its schema."""
    compiled = package(softcapped, example(), tmp_path / "cpu.pt2")
    for length in LENGTHS:
        inputs = example(length)
        torch.testing.assert_close(compiled(*inputs), softcapped(*inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("function", [causal, softcapped, explicit])
def test_a_package_runs_on_the_gpu(function: Callable[..., Tensor], tmp_path: Path) -> None:
    """There it holds the templates' kernels: nothing of it calls Python."""
    compiled = package(function, example(device="cuda", dtype=torch.bfloat16), tmp_path / "gpu.pt2")
    for length in LENGTHS:
        inputs = example(length, "cuda", torch.bfloat16)
        expected = function(*(x.double() for x in inputs)) if function is not explicit else function(*inputs)
        torch.testing.assert_close(compiled(*inputs).double(), expected.double(), rtol=2**-6, atol=2**-6)
