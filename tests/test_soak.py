"""What benchmarks/soak.py calls wrong, and one short run of it in this process."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import flash_inductor
from flash_inductor.matching.fusion_pass import rewrite_or_leave

compile_for_real = torch.compile


@pytest.fixture(scope="module")
def soak() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        yield importlib.import_module("soak")


def runs() -> dict[str, Any]:
    def one(variant: str, shift: float) -> dict[str, Any]:
        return {
            "variant": variant,
            "memory": {"4": {"allocated": 1000, "reserved": 2000}, "40": {"allocated": 1000, "reserved": 2000}},
            "graphs": {"4": 1, "40": 1},
            "losses": [5.0 - 0.1 * i + shift for i in range(40)],
            "sites": [True, True] if variant == "plugin" else [],
            "seconds": 1.0,
        }

    return {"stock": one("stock", 0.0), "plugin": one("plugin", 0.002), "noise": one("noise", 0.001)}


def test_a_good_run(soak: ModuleType) -> None:
    summary, problems = soak.judge(runs(), layers=2)
    assert problems == []
    assert summary["loss_distance"]["plugin"] == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r["plugin"]["memory"]["40"].update(allocated=1020), "allocated memory grew by 2.0%"),
        (lambda r: r["plugin"]["memory"]["40"].update(reserved=2200), "reserved memory grew by 10.0%"),
        (lambda r: r["plugin"].update(memory={"4": {"resident": 10}, "40": {"resident": 11}}), "resident memory grew"),
        (lambda r: r["plugin"]["graphs"].update({"40": 3}), "2 graphs were compiled after"),
        (lambda r: r["plugin"].update(graphs={"4": 2, "40": 2}), "2 graphs were compiled, 1 by stock"),
        (lambda r: r["plugin"].update(sites=[True]), "expected 2 replaced"),
        (lambda r: r["plugin"].update(sites=[True, False]), "expected 2 replaced"),
        (lambda r: r["stock"].update(sites=[True]), "stock had sites"),
        (lambda r: r["plugin"].update(losses=[x + 0.1 for x in r["stock"]["losses"]]), "losses differ"),
        (lambda r: r["plugin"].update(losses=[float("nan")] * 40), "losses differ"),
        (lambda r: [run.update(losses=[5.0] * 40) for run in r.values()], "learned nothing"),
    ],
)
def test_what_is_wrong_is_said(soak: ModuleType, change: Callable[[Any], Any], words: str) -> None:
    spoilt = copy.deepcopy(runs())
    change(spoilt)
    _, problems = soak.judge(spoilt, layers=2)
    assert any(words in text for text in problems), problems


def test_lengths_change_and_the_longest_comes_first(soak: ModuleType) -> None:
    args = soak.parse(["--device", "cpu", "--steps", "50"])
    lengths = soak.lengths(args)
    assert len(lengths) == 50 and lengths[0] == max(lengths) == 64 and len(set(lengths)) > 20
    assert lengths == soak.lengths(args)


def test_noise_is_about_one_rounding(soak: ModuleType) -> None:
    """Whether the losses of few steps show it depends on the machine; the parameters do."""
    args = soak.parse(["--device", "cpu"])
    stock, noise = (
        torch.nn.utils.parameters_to_vector(soak.make_model(x, args).parameters()) for x in ("stock", "noise")
    )
    assert 0.1 < (stock != noise).float().mean() < 0.9
    torch.testing.assert_close(noise, stock, rtol=8 * torch.finfo(stock.dtype).eps, atol=0)


def test_two_variants_learn_the_same(soak: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are rewritten as in a real run, but executed without Inductor: it's quick."""

    def compile_quickly(model: Any, *, options: Any) -> Any:  # Inductor's
        def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            if flash_inductor.is_enabled():
                rewrite_or_leave(gm.graph)
                gm.recompile()
            return gm.forward

        return compile_for_real(model, backend=backend)

    monkeypatch.setattr(torch, "compile", compile_quickly)
    args = soak.parse(["--device", "cpu", "--steps", "8"])
    found = {}
    for variant in soak.VARIANTS:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        found[variant] = soak.train(variant, args)
    stock, plugin, noise = (found[name]["losses"] for name in ("stock", "plugin", "noise"))
    assert len(stock) == 8
    for other in (plugin, noise):
        assert max(abs(a - b) for a, b in zip(stock, other, strict=True)) < 1e-4
    assert set(found["plugin"]["graphs"].values()) == {1}
