"""benchmarks/e2e.py at toy sizes.  Graphs are rewritten as in a real run, but executed without Inductor: it's quick."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import flash_inductor
from flash_inductor.matching.fusion_pass import rewrite_or_leave

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "e2e.py"
compile_for_real = torch.compile


@pytest.fixture
def e2e(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("transformers")
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "0")  # the script sets it for its process
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("e2e", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "e2e", module)
    spec.loader.exec_module(module)

    def compile_quickly(model: Any, **options: Any) -> Any:
        def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            if flash_inductor.is_enabled():
                rewrite_or_leave(gm.graph)
                gm.recompile()
            return gm.forward

        return compile_for_real(model, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", compile_quickly)
    return module


def run(e2e: ModuleType, tmp_path: Path, *options: str) -> dict[tuple[str, str], dict[str, Any]]:
    out = tmp_path / "out.json"
    e2e.main(["--device", "cpu", "--tiny", "--repeat", "2", "--warmup", "1", "--out", str(out), *options])
    return {(cell["family"], cell["impl"]): cell for cell in json.loads(out.read_text())["cells"]}


def test_plugin_replaces_every_site_and_gives_the_same_losses(e2e: ModuleType, tmp_path: Path) -> None:
    cells = run(e2e, tmp_path, "--families", "mistral-7b,gemma2-2b", "--impls", "eager,ours-sdpa,ours-eager")
    assert len(cells) == 6
    for (family, impl), cell in cells.items():
        if (family, impl) == ("gemma2-2b", "ours-sdpa"):
            assert "does not support" in cell["error"]  # transformers refuses it: SDPA has no softcap
            continue
        assert cell["error"] is None
        assert cell["within_rounding"] is True, cell
        assert cell["losses"][-1] < cell["losses"][0]
        assert cell["replaced"] == (2 if impl.startswith("ours-") else 0), cell["left_alone"]


def test_comparison_sees_wrong_losses_and_gradients(e2e: ModuleType) -> None:
    cells_module = importlib.import_module("cells")

    def cell(impl: str, losses: list[float], norm: float) -> Any:
        return e2e.Cell("llama3-8b", impl, losses=losses, gradient_norm=norm)

    cells = [
        cell("sdpa", [6.0, 5.0], 1.0),
        cell("eager", [6.0, 5.0001], 1.0001),
        cell("ours-sdpa", [6.0, 5.00015], 1.00015),
        cell("ours-eager", [6.0, 5.01], 1.0),
        cell("ours-eager", [6.0, 5.0], 1.01),
        cell("ours-eager", [6.0, float("nan")], 1.0),
    ]
    cells_module.compare(cells, rounding=1e-6)
    assert [c.within_rounding for c in cells] == [True, True, True, False, False, False]


def test_gpu_time_by_kind(e2e: ModuleType) -> None:
    kinds = importlib.import_module("kinds")
    expected = {
        "attention": [
            "forward_kernel", "backward_wide_kernel", "triton_tem_fused_flashbwd_forward_0",
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>",
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "triton_tem_fused_flex_attention_1",
        ],
        "products": ["nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "sm80_bf16_gemm", "triton_tem_fused_mm_3"],
        "fused": ["triton_poi_fused__scaled_dot_product_flash_attention_2", "triton_per_fused_add_rsqrt_0"],
        "other": ["Memset (Device)", "void at::native::reduce_kernel<128, 4>"],
    }  # fmt: skip
    for kind, names in expected.items():
        assert [kinds.kind_of(name) for name in names] == [kind] * len(names)
    assert kinds.sums([("forward_kernel", 3000.0), ("Memset (Device)", 6.0), ("finish_kernel", 600.0)], 3) == {
        "attention": pytest.approx(1.2),
        "other": pytest.approx(0.002),
    }


def test_profile_needs_a_gpu(e2e: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(e2e, tmp_path, "--families", "llama3-8b", "--profile")
    assert "--profile: expected --device cuda" in capsys.readouterr().err


def test_failing_cell_leaves_the_others(e2e: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = run(e2e, tmp_path, "--families", "llama3-8b", "--impls", "flex_attention,sdpa")
    assert "backward on CPU" in cells["llama3-8b", "flex_attention"]["error"]
    assert cells["llama3-8b", "sdpa"]["error"] is None
    assert "failed: NotImplementedError" in capsys.readouterr().out


def test_side_by_side_gives_every_cell(e2e: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # the processes run eagerly: this is about their turns
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parents[1]))
    cells = run(e2e, tmp_path, "--families", "llama3-8b", "--impls", "sdpa,eager,flex_attention", "--side-by-side")
    assert len(cells) == 3
    assert cells["llama3-8b", "sdpa"]["step_ms"] > 0 and cells["llama3-8b", "eager"]["within_rounding"] is True
    assert "backward on CPU" in cells["llama3-8b", "flex_attention"]["error"]


def test_unknown_names_are_refused(e2e: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        e2e.main(["--families", "llama"])
    assert "--families: expected some of llama3-8b" in capsys.readouterr().err
