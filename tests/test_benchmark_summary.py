"""What is made of a benchmark's measurements: ratios, the gate, tables, and the tuning tables' source."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import attention
import tune
from grid import cases, plots, summary

from flash_inductor.bench import check, ranking, tuning

# --- summary and gate


def cell(**changes: Any) -> dict[str, Any]:
    """Of three rounds in which the clock drifts, the same for everybody."""

    def found(ms: float, error: float = 2e-3) -> dict[str, Any]:
        rounds = [ms, 1.2 * ms, 1.5 * ms]
        part = {"ms": rounds[1], "rounds": rounds, "tflops": 600 / ms}
        errors = dict.fromkeys(check.RESULTS, error)
        return {"errors": errors, "forward": dict(part), "backward": dict(part)}

    case = cases.grid()[8]
    data = {
        "name": str(case),
        "group": "anchors",
        "case": {**asdict(case), "window": 1024, "softcap": None, "head_dim": 128, "v_head_dim": 0, "causal": True,
                 "length": 16384, "dtype": "bfloat16", "deterministic": False},
        "impls": {"ours": found(1.0), "stock": found(2.0), "flex": found(1.25), "fa4": {"unsupported": "absent"}},
    }  # fmt: skip
    for name, change in changes.items():
        data["impls"][name] = {**data["impls"].get(name, found(1.0)), **change}
    return data


def test_ratios_are_of_neighbours_in_time() -> None:
    c = cell()
    c["impls"]["flex"]["forward"]["rounds"] = [1.25, 1.5]  # fewer rounds, at the faster clock
    assert summary.ratio(c, "forward", "flex") == pytest.approx(1.25)
    assert summary.ratio(c, "forward", "fa4") is None
    assert summary.best_peer(c, "forward") == (pytest.approx(1.25), "flex")
    ratio, name = summary.best_peer(c, "forward", published=True) or (0, "")
    assert (ratio, name) == (pytest.approx(600 / 485), "fa4*")
    assert summary.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    means = {what: (count, mean) for what, count, mean, _ in summary.means([c])}
    assert means["windows and softcap: ours / flex"] == (2, pytest.approx(1.25))
    expected = ((600 / 485) * (600 / 390)) ** 0.5
    assert means["windows and softcap: ours / fa4"] == (2, pytest.approx(expected))


def test_figures_behind_are_listed_slowest_first() -> None:
    c = cell(flex={}, cudnn={})
    assert summary.behind([c]) == []
    c["impls"]["flex"]["forward"]["rounds"] = [0.9, 1.08, 1.35]
    c["impls"]["cudnn"]["backward"]["rounds"] = [0.8, 0.96, 1.2]
    assert summary.behind([c]) == [
        f"0.800 of cudnn: {c['name']} backward",
        f"0.900 of flex: {c['name']} forward",
    ]


def test_gate_passes_and_names_what_fails() -> None:
    name = cell()["name"]
    assert summary.gate([cell()]) == []
    slow = cell()
    slow["impls"]["stock"]["backward"]["rounds"] = [0.95, 1.2 * 0.95, 1.5 * 0.95]
    assert summary.gate([slow]) == [f"{name}: backward at 0.950 of stock's speed"]
    loose = dict.fromkeys(check.RESULTS, 2e-3) | {"query": 5e-3}
    assert summary.gate([cell(ours={"errors": loose})]) == [f"{name}: ours: error of query is 2.5x the best peer's"]
    assert summary.gate([cell(**{"ours:gluon": {"error": "wrong results"}})]) == [f"{name}: ours:gluon: wrong results"]
    assert summary.gate([cell(ours={"repeats": False})]) == [f"{name}: ours: results differ between runs"]
    broken = cell()
    broken["impls"]["ours"] = {"error": "hung for 90 s"}
    assert summary.gate([broken]) == [f"{name}: ours: hung for 90 s"]
    broken["impls"]["ours"] = {"unsupported": "no"}
    assert summary.gate([broken]) == [f"{name}: ours did not run: no"]
    assert summary.gate([]) == ["nothing was measured"]
    # A peer that is wrong is neither a bound nor a measure.
    wrong = cell(flex={"error": "wrong results"})
    for part in summary.PARTS:
        del wrong["impls"]["flex"][part]
    assert summary.gate([wrong]) == [] and summary.peers(wrong) == ["stock"]


def header(**changes: Any) -> dict[str, Any]:
    return {"command": "python x", "device": "toy", "versions": {"torch": "2"}, "commit": "abc", **changes}


def test_exit_code_tables_and_their_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, document = tmp_path / "run.json", tmp_path / "performance.md"
    data.write_text(json.dumps({**header(), "cells": [cell()]}))
    document.write_text(f"before\n{summary.BEGIN}\nold\n{summary.END}\nafter\n")
    assert attention.main(["--show", str(data), "--gate", "--markdown", str(document)]) == 0
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| 600/600 |" in text and "1.24 fa4*" in text and "Every cell passes." in text
    attention.main(["--show", str(data), "--markdown", str(document)])
    assert document.read_text() == text
    data.write_text(json.dumps({**header(), "cells": [cell(ours={"error": "wrong results"})]}))
    assert attention.main(["--show", str(data), "--gate"]) == 1
    assert attention.main(["--show", str(data)]) == 0
    assert "ours: wrong results" in capsys.readouterr().out
    document.write_text("no markers")
    with pytest.raises(ValueError, match="expected the markers"):
        summary.fill(document, {**header(), "cells": []})


def test_plots_show_ours_first_and_no_kernels_by_name() -> None:
    names = plots.shown([cell(cudnn={}, **{"ours:gluon": {}})])
    assert names == ["ours", "stock", "flex", "cudnn"]
    assert set(names) <= set(plots.COLOURS) and set(attention.ALL) - {n for n in attention.ALL if ":" in n} == set(
        plots.COLOURS
    )


# --- tuning


def measured(length: int, band: str = "causal", **ms: float) -> ranking.Measured:
    return ranking.Measured("fwd", 64, band, False, length, ms)


def test_rows_are_where_the_order_is_beaten() -> None:
    found = [
        measured(512, triton=3.0, gluon=2.0, cudnn=1.0),
        measured(1024, triton=3.0, gluon=2.0, cudnn=1.0),
        measured(4096, triton=3.0, gluon=1.01, cudnn=1.0),  # no difference that counts
        measured(8192, triton=0.5, gluon=1.0, cudnn=2.0),
        measured(512, "window", triton=3.0, gluon=2.0),
    ]
    rows = ranking.rows(found, 9)
    assert [(r.band, r.lengths, r.kernels) for r in rows] == [
        ("causal", (0, 2048), ("cudnn", "gluon")),
        ("causal", (5793, ranking.LONGEST), ("triton", "gluon")),
    ]
    assert [eval(ranking.row_text(r).rstrip(","), {"Row": ranking.Row}) for r in rows] == rows


def test_rows_come_from_a_run_of_the_grid() -> None:
    c = cell(**{"ours:gluon": {}, "ours:triton": {"unsupported": "no"}, "ours:cudnn": {}})
    del c["impls"]["ours:triton"]["forward"]
    by_kind = {m.kind: m for m in ranking.from_cells([c])}
    assert set(by_kind["fwd"].ms) == {"gluon", "cudnn"} and set(by_kind["bwd"].ms) == {"gluon", "cudnn", "triton"}
    assert by_kind["bwd"].problem == ("bwd", 128, "window", False)
    c["case"]["deterministic"] = True
    assert ranking.from_cells([c]) == []


def test_configurations_are_ordered_over_all_cases() -> None:
    found = {("fwd", 64): [{(64, 64, 4, 3): 1.0, (128, 64, 4, 3): 1.1}, {(64, 64, 4, 3): 2.0, (128, 64, 4, 3): 1.0}]}
    found["fwd", 64][0][32, 32, 4, 1] = 0.5  # failed in the other case
    table = tune.config_table(found)
    assert "64: (Config(128, 64, 4, 3), Config(64, 64, 4, 3), Config(32, 32, 4, 1),)" in table
    assert tuning.same([torch.ones(4)], [torch.ones(4)])
    assert not tuning.same([torch.full((4,), torch.nan)], [torch.ones(4)])


def test_cases_for_every_row_that_the_table_can_have() -> None:
    for length in (512, 4096):
        made = [ranking.Measured.of(c, "fwd", {}) for c in tune.kernel_cases([length])]
        bands = ["full", "causal", *(["window"] if length > 512 else [])]
        expected = {("fwd", d, band, cap) for d in (64, 128, 256) for band in bands for cap in (False, True)}
        assert {m.problem for m in made} == expected and len(made) == len(expected)
