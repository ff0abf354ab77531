"""The demo: its model, its data, its comparison, its command line, and one small run of both variants."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

import flash_inductor
from flash_inductor.__main__ import main
from flash_inductor.demo.model import Attention, LanguageModel, ModelConfig
from flash_inductor.demo.settings import Settings, load_text
from flash_inductor.demo.train import WorkerError, print_summary, run_worker, summarise
from flash_inductor.demo.worker import MemoryMeter, batches

TINY = Settings(
    length=48, steps=3, model=ModelConfig(dim=16, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=32, window=8)
)


def test_default_text_is_long_enough_for_every_device() -> None:
    assert len(load_text(None)) > 100 * Settings.for_device("cuda").length


def test_batches_repeat_and_targets_are_the_next_bytes() -> None:
    first, second = list(batches(TINY, 3)), list(batches(TINY, 3))
    text = load_text(None)
    for (tokens, targets), (again, _) in zip(first, second, strict=True):
        assert torch.equal(tokens, again)
        assert tokens.shape == targets.shape == (TINY.batch, TINY.length)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        assert bytes(tokens[0].tolist()) in text
    assert not torch.equal(first[0][0], first[1][0])


@pytest.mark.parametrize("window", [None, 8])
def test_attention_sees_its_window_and_nothing_else(window: int | None) -> None:
    torch.manual_seed(0)
    attention = Attention(TINY.model, window).double()
    x = torch.randn(1, 30, TINY.model.dim, dtype=torch.float64)
    changed = x.clone()
    changed[:, 10] += 1.0
    with torch.no_grad():
        moved = (attention(x) - attention(changed)).abs().amax(-1)[0] > 1e-12
    last = 29 if window is None else 10 + window - 1
    assert moved.nonzero().flatten().tolist() == list(range(10, last + 1))


def test_the_command_lines_example_is_the_demos_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "flash_inductor.demo:make", "--json"]) == 0
    assert [site["spec"]["softcap"] for site in json.loads(capsys.readouterr().out)["sites"]] == [50.0, 50.0]


def test_every_site_of_the_model_is_recognised() -> None:
    model = LanguageModel(TINY.model)
    tokens = torch.zeros(1, 48, dtype=torch.long)
    sites = flash_inductor.explain(model, tokens, tokens).sites
    assert [s.replaced for s in sites] == [True, True], [s.reason for s in sites]
    assert [s.spec and (s.spec.mask.lower, s.spec.mask.upper, s.spec.softcap) for s in sites] == [
        (-7, 0, 50.0),
        (None, 0, 50.0),
    ]


def test_meter_forgets_what_came_before_start() -> None:
    meter = MemoryMeter("cpu")
    before = torch.ones(64 << 20)  # 256 MiB
    del before
    meter.start()
    assert meter.peak() - meter.idle < 100 << 20
    kept = torch.ones(32 << 20)
    assert meter.peak() - meter.idle > 100 << 20
    del kept


def record(losses: list[float], eager: list[float] | None = None) -> dict[str, Any]:
    steps = [{"step": i, "loss": x, "seconds": 0.1} for i, x in enumerate(losses)]
    done = {"peak_bytes": 3 << 20, "idle_bytes": 1 << 20, "torch": "2", "device": "cpu", "parameters": 1, "sites": []}
    result: dict[str, Any] = {"train": steps, "done": done}
    if eager is not None:
        result["eager"] = [{"step": i, "loss": x, "seconds": 0.1} for i, x in enumerate(eager)]
    return result


@pytest.mark.parametrize(
    ("losses", "equal"),
    [([5.0, 4.00004], True), ([5.0, 4.001], False), ([5.0, math.nan], False)],
)
def test_verdict_is_measured_against_eager(losses: list[float], equal: bool) -> None:
    stock = record([5.0, 4.0], eager=[5.0, 4.00001])
    result = summarise(TINY, stock, record(losses))
    assert result["equal_within_rounding"] is equal
    assert result["stock"]["step_mib"] == 2.0
    text = io.StringIO()
    print_summary(result, Console(width=120, file=text))
    assert ("DIFFERENT" in text.getvalue()) is not equal


def test_command_line_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    assert main(["demo", "--device", "cpu", "--text", str(short)]) == 2
    assert "--text: expected a file of more than" in capsys.readouterr().err
    assert main(["demo", "--device", "cpu", "--text", str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["demo", "--steps", "1"])


def test_failed_run_shows_the_end_of_its_errors() -> None:
    with Progress(disable=True) as progress, pytest.raises(WorkerError, match="more than 99999999 bytes"):
        run_worker("plugin", replace(TINY, length=99999999), progress)


def test_both_variants_train_alike() -> None:
    with Progress(disable=True) as progress:
        stock, plugin = (run_worker(variant, TINY, progress) for variant in ("stock", "plugin"))
    result = summarise(TINY, stock, plugin)
    assert stock["done"]["sites"] == []
    assert result["replaced"] == len(result["sites"]) == 2, result["sites"]
    assert result["equal_within_rounding"], result
    assert result["stock"]["losses"] != result["stock"]["losses"][:1] * 3  # it does train
    json.dumps(result)


def test_readme_shows_what_explain_prints() -> None:
    model = LanguageModel(ModelConfig())
    tokens = torch.zeros(1, 1024, dtype=torch.long)
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    assert str(flash_inductor.explain(model, tokens, tokens)).strip() in readme
