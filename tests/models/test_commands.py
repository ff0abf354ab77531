"""benchmarks/coverage.py and benchmarks/blocks.py at toy sizes; graphs run without Inductor: it's quick."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import flash_inductor
from flash_inductor.matching.fusion_pass import graphs_of, rewrite_or_leave

compile_for_real = torch.compile


def load(name: str) -> ModuleType:
    """A script as a module under another name: ``coverage`` is also a package."""
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the scripts set for their process stays in the test."""
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "0")
    monkeypatch.setenv("FLASH_INDUCTOR_STRICT", "1")


def test_coverage_counts_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = load("coverage")

    out = tmp_path / "out.json"
    arguments = ["--models", "nanogpt_flash,tel", "--modes", "train,eval", "--check", "--out", str(out)]
    assert script.main(arguments) == 0
    cells = {(c["model"], c["mode"]): c for c in json.loads(out.read_text())}
    assert len(cells) == 4
    for key in (("nanogpt_flash", "train"), ("nanogpt_flash", "eval"), ("tel", "train")):
        assert cells[key]["coverage"]["replaced"] == cells[key]["coverage"]["sites"] == 2
        assert cells[key]["comparison"]["right"]
    printed = capsys.readouterr().out
    assert "| default implementation, train | 100.0% | 4/4 | 2 | 2 | 0 |" in printed
    assert "| nanogpt_flash | sdpa | 2/2 | 2/2 |" in printed


def test_coverage_reports_failures_and_wrong_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zoo.compare import Comparison
    from zoo.measure import Coverage

    script = load("coverage")

    def wrong(model: Any, inputs: Any, **options: Any) -> tuple[Comparison, Coverage]:
        return Comparison(output=1.0, right=False), Coverage(sites=2, replaced=1)

    def failing(model: Any, inputs: Any, **options: Any) -> Coverage:
        raise ValueError("no such thing")

    monkeypatch.setattr(script, "compare", wrong)
    monkeypatch.setattr(script, "measure", failing)
    assert script.main(["--models", "hand_triu_where", "--modes", "eval", "--check"]) == 1
    assert "| default implementation, eval | 50.0% | 1/2 | 1 | 1 | 1 |" in capsys.readouterr().out
    assert script.main(["--models", "hand_triu_where", "--modes", "train"]) == 1
    assert "failed: ValueError: no such thing" in capsys.readouterr().out


def test_coverage_refuses_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    script = load("coverage")

    with pytest.raises(SystemExit):
        script.main(["--modes", "trian"])
    assert "--modes: expected some of train" in capsys.readouterr().err


def test_blocks_replaces_every_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("blocks")

    def compile_quickly(model: Any = None, **options: Any) -> Any:
        if model is None:  # transformers decorates functions of its own, in modules it imports late
            return compile_for_real(**options)

        def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            if flash_inductor.is_enabled():
                for graph, outer in graphs_of(gm):
                    rewrite_or_leave(graph, outer=outer)
                gm.recompile()
            return gm.forward

        return compile_for_real(model, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", compile_quickly)
    out = tmp_path / "out.json"
    arguments = ["--device", "cpu", "--tiny", "--repeat", "1", "--warmup", "0", "--loss-steps", "2", "--no-dropout"]
    script.main([*arguments, "--impls", "eager,ours-eager", "--out", str(out)])
    cells = {(cell["family"], cell["impl"]): cell for cell in json.loads(out.read_text())["cells"]}
    assert len(cells) == 2 * len(script.MODELS)
    for (name, impl), cell in cells.items():
        assert cell["error"] is None, (name, impl)
        assert cell["within_rounding"] is True, cell
        assert cell["replaced"] == (cell["layers"] if impl.startswith("ours-") else 0), cell["left_alone"]
