"""torch.export and AOTInductor: the exported program, and the package that is compiled from it, loaded and run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flash_inductor
from flash_inductor.report import collect

from .model import Model, causal, softcapped
from .packages import LENGTHS, STEPS, Ending, control, example, explicit, export, judge, package, watch


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


@pytest.fixture(scope="module")
def cpu_control(tmp_path_factory: pytest.TempPathFactory) -> Ending:
    return package(control, "cpu", tmp_path_factory.mktemp("control"))


@pytest.fixture(scope="module")
def gpu_control(tmp_path_factory: pytest.TempPathFactory) -> Ending:
    return package(control, "cuda", tmp_path_factory.mktemp("control"))


def test_a_package_runs_on_the_cpu(cpu_control: Ending, tmp_path: Path) -> None:
    """There the op is called, through C++ that must be given every integer of its schema."""
    assert cpu_control.worked, cpu_control
    judge(package(softcapped, "cpu", tmp_path), cpu_control)


@pytest.mark.gpu
@pytest.mark.parametrize("function", [causal, softcapped, explicit])
def test_a_package_runs_on_the_gpu(function: Callable[..., Tensor], gpu_control: Ending, tmp_path: Path) -> None:
    """There it holds the templates' kernels: nothing of it calls Python.  Where torch can load packages, that is."""
    judge(package(function, "cuda", tmp_path), gpu_control)


def test_a_child_that_crashes_says_how_far_it_came(tmp_path: Path) -> None:
    code = "import os; print('made', flush=True); os.kill(os.getpid(), 11)"
    ending = watch("-c", code, cache=tmp_path)
    assert ending[:2] == (("made",), -11) and "Segmentation fault" in ending.errors


CRASH, ERROR = Ending(("made",), -11, ""), Ending(("made",), 1, "")
WORKED, WRONG = Ending(STEPS, 0, ""), Ending(STEPS[:2], 1, "")


@pytest.mark.parametrize(
    ("ours", "reference", "outcome"),
    [
        (WORKED, WORKED, None),
        (WORKED, CRASH, None),
        (CRASH, CRASH, pytest.xfail.Exception),
        (CRASH, WORKED, AssertionError),
        (ERROR, CRASH, AssertionError),
        (WRONG, CRASH, AssertionError),
        (Ending((), 1, ""), Ending((), 1, ""), AssertionError),
        (Ending(STEPS, -11, ""), WORKED, AssertionError),
    ],
)
def test_only_what_the_control_cannot_do_either_is_expected_to_fail(
    ours: Ending, reference: Ending, outcome: type[BaseException] | None
) -> None:
    with pytest.raises(outcome) if outcome else nullcontext():
        judge(ours, reference)
