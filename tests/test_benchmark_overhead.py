"""benchmarks/overhead.py: what it measures and when its gates fail, without Inductor."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_inductor.matching.fusion_pass import FUSION

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import overhead


def pass_only(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    """A backend that rewrites and runs what it gets."""
    FUSION(gm.graph)
    gm.recompile()
    return gm.forward


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_every_layer_is_replaced_and_the_pass_is_timed(name: str) -> None:
    args = argparse.Namespace(layers=2, device="cpu", backend=pass_only)
    row = overhead.compile_once(name, args)
    assert row["replaced"] == 2
    assert 0 < row["passes"]["FusionPass"] < row["seconds"]
    assert row["share"] == pytest.approx(row["passes"]["FusionPass"] / row["seconds"])
    assert type(FUSION).__call__.__name__ == "__call__"  # the timing is taken out again


def test_calls_run_both_implementations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_for_real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **o: compile_for_real(f, **o, backend=pass_only))
    out = tmp_path / "calls.json"
    options = ["--lengths", "128", "--dims", "16", "--calls", "2", "--rounds", "3", "--device", "cpu"]
    assert overhead.main(["calls", *options, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == [f"N128 D16 {what}" for what in ("inference", "forward", "both")]
    assert all(set(row["us"]) == {"stock", "ours"} and row["ratio"] > 0 for row in rows)


def test_gates_name_what_is_over_the_limit() -> None:
    good = {"name": "N256 D64 both", "ratio": 1.0, "host_bound": True}
    assert overhead.calls_gate([good, {**good, "ratio": 2.0, "host_bound": False}]) == []
    assert overhead.calls_gate([{**good, "ratio": 1.2}]) == ["N256 D64 both: 1.20 times stock's host time"]
    fast = {"model": "sdpa", "share": 0.01, "replaced": 12}
    assert overhead.compile_gate([fast]) == []
    assert overhead.compile_gate([{**fast, "share": 0.03}]) == ["sdpa: passes take 3.0 %"]
    assert overhead.compile_gate([{**fast, "replaced": 0}]) == ["sdpa: no site was replaced"]
