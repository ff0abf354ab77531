"""flash-inductor bench: sizes and models at toy size, what it says of wrong results, its data, and a plot."""

from __future__ import annotations

import json
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_inductor.bench import impls, model
from flash_inductor.bench.case import Case
from flash_inductor.bench.timing import CpuClock
from flash_inductor.cli import main

HERE = "tests.cli.factories"
TINY = ["bench", "--device", "cpu", "--length", "24", "--head-dim", "8", "--heads", "2", "--ms", "1", "--rounds", "1"]


@pytest.fixture(autouse=True)
def from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op as it is: what compiling it takes is no matter of most tests here."""
    monkeypatch.setitem(
        impls.IMPLEMENTATIONS,
        "ours",
        lambda case, device: lambda q, k, v: torch.ops.flashbwd.attn(q, k, v, **case.options)[0],
    )


@pytest.mark.usefixtures("uncompiled")
def test_sizes_give_a_table_data_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    options = ["--window", "5", "--softcap", "3", "--impls", "eager,flex", "--json", str(out), "--plot", str(plot)]
    assert main([*TINY, "--length", "16", "24", *options]) == 0
    data = json.loads(out.read_text())
    assert [c["name"] for c in data["cells"]] == [
        f"B1 H2/2 N{n} D8 causal window 5 softcap 3 fp32 bnhd" for n in (16, 24)
    ]
    first = data["cells"][0]["impls"]
    assert list(first) == ["ours", "eager", "flex"] and "unsupported" in first["flex"]
    assert first["ours"]["forward"]["ms"] > 0 and first["ours"]["backward"]["ms"] > 0
    assert max(first["ours"]["errors"].values()) < 1e-5 and data["failures"] == []
    text = capsys.readouterr().out
    assert "eager" in text and "flex: no backward on the CPU" in text and re.search(r"cpu, \d+ threads; torch", text)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_wrong_result_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(case: Case, device: str) -> impls.Attention:
        right = impls.eager(case, device)
        return lambda q, k, v: right(q, k, v) * 1.0001

    monkeypatch.setitem(impls.IMPLEMENTATIONS, "ours", wrong)
    assert main([*TINY, "--impls", "eager", "--json"]) == 1
    done = capsys.readouterr()
    assert any("x the best other's" in text for text in json.loads(done.out)["failures"])
    assert "wrong: B1 H2/2 N24 D8 causal fp32 bnhd: error of out" in " ".join(done.err.split())

    def raising(case: Case, device: str) -> impls.Attention:
        raise RuntimeError("broken")

    monkeypatch.setitem(impls.IMPLEMENTATIONS, "ours", raising)
    assert main([*TINY, "--impls", "eager"]) == 1
    assert "ours: RuntimeError: broken" in " ".join(capsys.readouterr().out.split())


def test_a_model_compiled_for_real(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"{HERE}:sdpa", "--device", "cpu", "--ms", "1", "--rounds", "1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["model"]
    assert list(data["implementations"]) == ["eager", "stock", "ours"] and data["not_checked"] is None
    assert all(x["error"] < 1e-4 and x["ms"] > 0 for x in data["implementations"].values())
    # One site: ours was compiled apart from stock, and stock as without the plugin.
    assert len(data["sites"]) == 1 and data["sites"][0]["replaced"]
    assert data["step"] == "forward, loss and backward"


def measured(module: nn.Module, *args: Any, **compiled: Callable[[Any], Any]) -> dict[str, Any]:
    return model.measure(module, args, {}, train=True, compiled=compiled, clock=CpuClock(), rounds=1, total_ms=0.1)


def test_a_wrong_model_is_found_and_a_random_one_not_compared() -> None:
    class Off(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1.01

    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    off = Off(8, 8)
    off.load_state_dict(layer.state_dict())
    found = measured(layer, x, eager=lambda m: m, ours=lambda m: off)["implementations"]
    assert found["eager"]["error"] < 1e-5 < found["ours"]["error"] and model.wrong(found)
    assert not model.wrong(measured(layer, x, eager=lambda m: m, ours=lambda m: m)["implementations"])
    dropped = measured(nn.Sequential(layer, nn.Dropout(0.5)), x, ours=lambda m: m)
    assert "random numbers" in dropped["not_checked"] and "error" not in dropped["implementations"]["ours"]


def test_a_model_that_can_not_run_in_float64_is_timed_all_the_same() -> None:
    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.ones(8, 8, dtype=torch.float32)

    found = measured(Narrow(), torch.randn(4, 8, requires_grad=True), ours=lambda m: m)
    assert "doesn't run in float64: RuntimeError" in found["not_checked"] and found["implementations"]["ours"]["ms"] > 0


def test_a_step_can_be_told_apart_by_a_clock() -> None:
    """GpuClock remembers what a call's launch takes, in a WeakKeyDictionary."""
    steps = [model.Step(abs, abs, (), {}, False) for _ in range(2)]
    assert len(weakref.WeakKeyDictionary(zip(steps, "ab", strict=True))) == 2


def test_loss_is_the_models_own_or_made_of_all_results() -> None:
    one = torch.tensor(3.0)
    assert model.loss_of({"loss": one, "logits": torch.ones(2)}) is one
    assert model.loss_of((one,)) is one
    assert model.loss_of([torch.full((2,), 2.0), {"x": torch.ones(3)}, torch.ones(3, dtype=torch.int64)]).item() == 5.0
    with pytest.raises(ValueError, match="no floating-point tensor"):
        model.loss_of(torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--impls", "ours,flahs"], "--impls: expected some of ours, stock"),
        (["--heads", "4", "--kv-heads", "3"], "--kv-heads: expected a divisor of --heads 4, got 3"),
        (["--softcap", "-1"], "--softcap: expected a positive number"),
        (["--plot", "plot.bmp"], "--plot: expected a name that ends in .png"),
        (["--plot", "/no/such/folder/plot.png"], "--plot: there is no folder /no/such/folder"),
        (["--json", "/no/such/folder/data.json"], "--json: there is no folder"),
        (["--device", "cuda:77"], "--device: 'cuda:77' can't be used"),
        (["--device", "meta"], "--device: expected cpu or cuda, got 'meta'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_too_little_memory_names_the_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def too_large(case: Case, device: str) -> list[Tensor]:
        return [torch.empty(1 << 60)]

    monkeypatch.setattr(impls, "inputs", too_large)
    assert main(TINY) == 2
    assert "not enough memory for B1 H2/2 N24 D8 causal fp32 bnhd (case 1 of 1); take a" in capsys.readouterr().err


def test_plots_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*TINY, "--plot", "x.png"]) == 2
    assert 'pip install "flash-inductor[plot]"' in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--length", "256", "--head-dim", "64", "--batch", "1", "--heads", "4"]
    assert main(["bench", *sizes, "--ms", "5", "--impls", "ours,stock,flash,eager", "--json"]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    assert all(cell["impls"][name]["forward"]["ms"] > 0 for name in ("ours", "stock", "flash", "eager"))
    assert main(["bench", f"{HERE}:plain", "--device", "cuda", "--ms", "5", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["model"]
    assert data["implementations"]["ours"]["peak_mib"] > 0 and data["sites"][0]["replaced"]
