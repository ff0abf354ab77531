"""flash-inductor explain: models from module:factory, their arguments, and what is said of wrong ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_inductor.cli import main
from flash_inductor.cli.errors import UsageError
from flash_inductor.cli.target import parse_input, unpack

HERE = "tests.cli.factories"


@pytest.fixture(autouse=True)
def from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(sys, "path", [*sys.path])


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["explain", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("factory", ["plain", "with_keywords", "function"])
def test_everything_replaced_is_exit_code_0(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, data = explained(capsys, f"{HERE}:{factory}")
    assert (code, data["replaced"], data["left_alone"]) == (0, 1, 0)


def test_a_site_left_alone_is_exit_code_1_with_cause_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    code, data = explained(capsys, f"{HERE}:refused")
    site = data["sites"][0]
    assert code == 1 and "neither a constant" in site["cause"] and site["remedy"]
    assert main(["explain", f"{HERE}:refused"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "0 of 1 attention site replaced" in text and "left alone" in text and "factories.py" in text


def test_inputs_mode_and_device_by_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = [f"{HERE}:tokens", "--input", "2x24:int64:50", "--device", "cpu"]
    code, data = explained(capsys, *options, "--train")
    assert (code, data["replaced"]) == (0, 1)
    code, data = explained(capsys, *options, "--eval")
    assert (code, data["sites"]) == (1, [])
    assert main(["explain", *options, "--train", "--draw", str(tmp_path / "g.dot")]) == 0
    assert "cluster_1" in (tmp_path / "g.dot").read_text()


def test_input_option() -> None:
    x = parse_input("2x3:int64:5")
    assert x.shape == (2, 3) and x.dtype == torch.int64 and x.max() < 5
    assert parse_input("4,1").dtype == torch.float32 and parse_input("7:bfloat16").shape == (7,)
    assert set(parse_input("64:bool").tolist()) == {False, True}
    for bad in ("", "2xa", "2x3:int13", "2:int64:0", "-1"):
        with pytest.raises(UsageError, match="expected SHAPE"):
            parse_input(bad)


def test_unpack_takes_every_documented_form() -> None:
    x = torch.ones(1)
    for result in ((abs, x), (abs, (x,)), (abs, [x])):
        assert unpack("t", result) == (abs, (x,), {})
    assert unpack("t", (abs, {"x": 1})) == (abs, (), {"x": 1})
    assert unpack("t", (abs, (1,), {"x": 2})) == (abs, (1,), {"x": 2})
    for bad in (3, (), (abs, 3), (abs, (), {}, 4), (abs, (), 5)):
        with pytest.raises(UsageError, match="expected a model"):
            unpack("t", bad)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nocolon"], "expected MODULE:FACTORY"),
        (["no.such.module:make"], "there is no module 'no.such.module'; write it as in an import statement"),
        ([f"{HERE}:nothing"], "has no 'nothing'; it has "),
        ([f"{HERE}:NOT_CALLABLE"], "is a int; expected a function"),
        ([f"{HERE}:needs_something"], "needs_something() failed, it is called without arguments: TypeError"),
        ([f"{HERE}:fails"], "RuntimeError: no weights here (factories.py:"),
        ([f"{HERE}:returns_nothing"], "returned NoneType; expected a model"),
        ([f"{HERE}:model_only"], "no arguments for it; return (model, args) from it, or pass --input"),
        ([f"{HERE}:wrong_arguments"], "can't be run with these arguments: "),
        ([f"{HERE}:plain", "--device", "nowhere"], "--device: 'nowhere' can't be used"),
        ([f"{HERE}:plain", "--draw", "graph.txt"], "--draw: path: expected a name that ends in"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error


def test_a_module_that_needs_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "needs_more.py").write_text("import not_there_at_all\n")
    (tmp_path / "is_broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "needs_more:make"]) == 2
    assert "needs_more needs the module not_there_at_all, which is not installed" in capsys.readouterr().err
    assert main(["explain", "is_broken:make"]) == 2
    assert "importing is_broken failed: ZeroDivisionError" in capsys.readouterr().err


def test_too_little_memory_is_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def too_large() -> Any:
        return torch.empty(1 << 60)

    monkeypatch.setattr("tests.cli.factories.plain", too_large)
    assert main(["explain", f"{HERE}:plain"]) == 2
    assert "not enough memory: " in (error := capsys.readouterr().err) and "take smaller sizes" in error


def test_commands_are_listed_and_a_wrong_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("demo", "doctor", "explain", "Exit codes"))
    with pytest.raises(SystemExit) as end:
        main(["explode"])
    assert end.value.code == 2 and "explode" in capsys.readouterr().err
