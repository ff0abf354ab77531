"""Large logits, saturation, long rows, overflow, NaN and inf, on the CPU: within the bounds, and contained."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flash_inductor.ops import attn, attn_backward
from flash_inductor.reference import attention_backward, attention_forward
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.testing import make_inputs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OURS = ("ours tiled", "ours ATen flash")
DTYPES = ["float32", "bfloat16", "float16"]
HARD = ["large logits", "softcap at saturation", "products beyond fp16", "window", "rows that see nothing", "long rows"]


@pytest.fixture(scope="module")
def numerics() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("numerics")
        for name in [n for n in sys.modules if n == "numerics" or n.partition(".")[0] == "precision"]:
            del sys.modules[name]


def cells_of(numerics: ModuleType, case: Any, *names: str) -> dict[str, dict[str, Any]]:
    tensors = case.tensors("cpu")
    exactly = numerics.expected(case, tensors, "cpu")
    runs = numerics.implementations("cpu")
    return {name: numerics.cell_of(case, name, runs[name], tensors, exactly) for name in names or OURS}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", HARD)
def test_every_kernel_is_within_its_bounds(numerics: ModuleType, group: str, dtype: str) -> None:
    (case,) = (c for c in numerics.cases("cpu") if (c.group, c.dtype) == (group, dtype))
    cells = cells_of(numerics, case)
    assert "errors" in cells["ours tiled"]
    assert numerics.faults(list(cells.values())) == []
    figures = cells["ours tiled"]["errors"]
    assert all(0 < x["abs"] < math.inf and x["share"] <= 1 and x["wrong"] == 0 for x in figures.values())


def test_code_written_out_overflows_where_ours_does_not(numerics: ModuleType) -> None:
    (case,) = (c for c in numerics.cases("cpu") if c.name.startswith("products beyond fp16: float16"))
    cells = cells_of(numerics, case, "ours tiled", "written out")
    assert cells["written out"]["errors"]["out"]["wrong"] == 384 * 4 * 64  # so the input is as hard as it says
    assert cells["ours tiled"]["errors"]["out"]["wrong"] == 0


@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("number", ["NaN", "inf", "-inf"])
def test_what_is_not_finite_reaches_what_sees_it_and_no_more(numerics: ModuleType, number: str, where: str) -> None:
    (case,) = (c for c in numerics.cases("cpu") if c.group == f"{number} in the last {where}")
    found = cells_of(numerics, case, "ours tiled")["ours tiled"]["errors"]
    assert [x["wrong"] for x in found.values()] == [0] * 5
    out = attn(*case.tensors("cpu")[:3], **case.options)[0]
    assert out[:, :, :-1].isfinite().all()
    assert not out[:, :, -1].isfinite().any() or (where == "key" and number != "NaN")


@pytest.mark.parametrize("where", ["key", "value"])
def test_what_nobody_sees_may_be_nan(numerics: ModuleType, where: str) -> None:
    (case,) = (c for c in numerics.cases("cpu") if c.group == f"NaN in an unseen {where}")
    tensors = case.tensors("cpu")
    clean = [x.nan_to_num(nan=0.0) for x in tensors]
    run = numerics.implementations("cpu")["ours tiled"]
    got, want = run(case, tensors), run(case, clean)
    # A NaN among the inputs makes the kernel take its exact path, whose sums run in another order.
    assert all(x.isfinite().all() for x in got.values())
    for name, x in got.items():
        torch.testing.assert_close(x, want[name], rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("hidden", [True, False], ids=["hidden", "seen"])
@pytest.mark.parametrize("how", ["mask", "bias", "segments"])
def test_nan_behind_optional_tensors(how: str, hidden: bool) -> None:
    """Key 5 is NaN; queries 0..7 don't see it, or everything does."""
    query, key, value = make_inputs(heads=2, q_len=16, kv_len=16, head_dim=8, dtype=torch.float64)
    key[:, :, 5] = value[:, :, 5] = math.nan
    rows = torch.arange(16)
    seen = torch.ones(1, 1, 16, 16, dtype=torch.bool)
    if hidden:
        seen[:, :, :8, 5] = False
    segments = torch.zeros(2, 16, dtype=torch.int32)
    extras: dict[str, Any] = {"mask": seen.expand(2, 1, 16, 16)}
    if how == "bias":
        extras = {"bias": torch.zeros(1, 1, 16, 16, dtype=torch.float64).masked_fill(~seen, -math.inf)}
    if how == "segments":
        segments[:, :8] = 1
        keys = torch.where((rows == 5) | (rows >= 8), 0, 1).to(torch.int32).expand(2, 16).contiguous()
        extras = {"query_segments": segments if hidden else torch.zeros_like(segments), "key_segments": keys}
    out, lse = attn(query, key, value, **extras)
    first, last = out[:, :, :8], out[:, :, 8:]
    assert first.isfinite().all() if hidden else first.isnan().all()
    assert last.isnan().all()
    want_out, want_lse = attention_forward(query, key, value, None, **extras)
    torch.testing.assert_close(out, want_out, equal_nan=True)
    torch.testing.assert_close(lse, want_lse, equal_nan=True)
    grad_out = torch.ones_like(out)
    grads = attn_backward(grad_out, None, query, key, value, out, lse, **extras)
    wanted = attention_backward(grad_out, None, query, key, value, None, **extras)
    for got, want in zip(grads[:3], wanted[:3], strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blind_rows_are_exactly_zero(dtype: torch.dtype) -> None:
    query, key, value = make_inputs(q_len=40, kv_len=24, dtype=dtype)
    options: dict[str, Any] = {"is_causal": True, "diagonal": -16}
    out, lse = attn(query, key, value, **options)
    grad_out = torch.randn_like(out)
    grads = attn_backward(grad_out, None, query, key, value, out, lse, **options)
    assert not out[:, :, :16].any() and (lse[:, :, :16] == -math.inf).all() and not grads[0][:, :, :16].any()
    assert lse[:, :, 16:].isfinite().all()
    seeing = attn_backward(
        grad_out[:, :, 16:], None, query[:, :, 16:], key, value, out[:, :, 16:], lse[:, :, 16:],
        is_causal=True,
    )  # fmt: skip
    torch.testing.assert_close(grads[1], seeing[1])
    torch.testing.assert_close(grads[2], seeing[2])


def test_saturated_softcap_gives_no_gradient_of_scores() -> None:
    """At 40 times the cap tanh is 1 in float32: its slope is 0, and the probabilities are those of equal scores."""
    query, key, value = make_inputs(q_len=8, kv_len=8, head_dim=8)
    query, key = query.sign() * 100, key.sign().abs()
    query = query.abs()  # every score is 100 * 8 / sqrt(8)
    out, lse = attn(query, key, value, softcap=5.0)
    grads = attn_backward(torch.ones_like(out), None, query, key, value, out, lse, softcap=5.0)
    torch.testing.assert_close(out, value.mean(2, keepdim=True).expand_as(out))
    torch.testing.assert_close(lse, torch.full_like(lse, 5.0 + math.log(8)))
    assert not grads[0].any() and not grads[1].any() and grads[2].any()


def test_exact_agrees_with_the_reference(numerics: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results in chunks, on which all measured errors stand."""
    exact = sys.modules["precision.exact"]
    query, key, value = make_inputs(heads=4, kv_heads=2, q_len=13, kv_len=17, head_dim=8, v_head_dim=4)
    monkeypatch.setitem(exact.MOST_SCORES, "cpu", 2 * 4 * 17 * 5)  # three chunks
    grad_out = torch.randn(2, 4, 13, 4)
    for options in ({}, {"softcap": 1.5, "scale": -0.7}, {"mask": MaskSpec(-4, 2)}, {"mask": MaskSpec(upper=-6)}):
        spec = AttentionSpec(**options)
        unit = exact.roundings(torch.float32, "cpu")
        found, bound = exact.exact(query, key, value, grad_out, spec, unit)
        want = attention_forward(query, key, value, spec)
        want += attention_backward(grad_out, None, query, key, value, spec)[:3]
        for name, x in zip(exact.RESULTS, want, strict=True):
            torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-12)
            assert bound[name].shape == x.shape and (bound[name] >= 0).all()


@pytest.mark.parametrize(
    "spoil",
    [lambda x: x * (1 + 2**-9), lambda x: x + 1e-3, lambda x: torch.where(x == x.max(), math.nan, x)],
    ids=["relative", "absolute", "NaN"],
)
def test_faults_are_found(numerics: ModuleType, spoil: Any) -> None:
    """Errors above the bound of a kernel of ours, and only of ours, are reported."""
    (case,) = (c for c in numerics.cases("cpu") if c.name.startswith("window: float32"))
    tensors = case.tensors("cpu")
    exactly = numerics.expected(case, tensors, "cpu")
    run = numerics.implementations("cpu")["ours tiled"]

    def spoilt(case: Any, tensors: Any) -> Any:
        results = run(case, tensors)
        return {**results, "dk": spoil(results["dk"])}

    cells = [numerics.cell_of(case, name, spoilt, tensors, exactly) for name in ("ours tiled", "SDPA math")]
    (fault,) = numerics.faults(cells)
    assert "ours tiled: dk" in fault


def test_tables_are_put_between_the_markers(numerics: ModuleType, tmp_path: Path) -> None:
    document, out = tmp_path / "numbers.md", tmp_path / "out.json"
    document.write_text("before\n<!-- cpu: begin -->\nold\n<!-- cpu: end -->\nafter\n")
    options = ["--device", "cpu", "--select", ": float16 384x284", "--out", str(out), "--markdown", str(document)]
    assert numerics.main(options) == 0
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "Rows that see nothing" in text and "ours tiled" in text
    assert len(json.loads(out.read_text())["cells"]) == 5
    with pytest.raises(ValueError, match="markers"):
        numerics.tables.fill(tmp_path / "out.json", {"header": {}, "cells": []}, "cpu")


def test_every_kind_of_code_is_compiled_once(numerics: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """By some process of those that share the work, also where an implementation refuses a case."""
    ran: list[tuple[str, tuple[int, int], tuple[str, ...]]] = []

    def note(case: Any, tensors: Any) -> Any:
        ran.append((case.dtype, case.dims, (*sorted(case.options), str(case.q_len), str(case.kv_len))))
        raise NotImplementedError

    monkeypatch.setattr(numerics, "COMPILED", ("ours tiled",))
    monkeypatch.setattr(numerics, "implementations", lambda device: {"ours tiled": note})
    chosen = [case for case in numerics.cases("cpu") if case.dtype == "float16" and case.q_len < 1000]
    for share in ("0/2", "1/2"):
        args = numerics.parse(["--device", "cpu", "--share", share])
        numerics.warm(chosen, args)
    kinds = {(c.dtype, c.dims, (*sorted(c.options), str(c.q_len), str(c.kv_len))) for c in chosen}
    assert len(ran) == len(set(ran)) and set(ran) == kinds
