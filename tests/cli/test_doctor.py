"""flash-inductor doctor: a sound machine, and each problem it is to name with a remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_inductor
from flash_inductor.cli import checks, main, selftest
from flash_inductor.cli.checks import Check
from flash_inductor.ops import tuned


def test_a_sound_machine_is_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    done = capsys.readouterr()
    data = json.loads(done.out)
    assert data["ok"] and data["version"] == flash_inductor.__version__
    names = [check["name"] for check in data["checks"]]
    assert {"torch", "triton", "C++ compiler", "settings", "compiled model, forward and backward"} <= set(names)
    assert sum(name.startswith("op, ") for name in names) == 3
    assert {row["kernel"] for row in data["kernels"]} == {"ATen CPU flash", "tiled CPU kernel"}
    assert "everything works" in done.err and not flash_inductor.is_enabled()


def test_a_problem_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("flash_inductor.cli.selftest.CASES", {})
    monkeypatch.setattr("flash_inductor._compat.toolchain.cpp_compiler", lambda: None)
    assert main(["doctor", "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert "✗ C++ compiler: none" in text and "what to do: install g++" in text and "1 problem" in text
    assert "compiled model" not in text  # it would fail for the reason named


def test_a_gpu_asked_for_and_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--device", "cuda"]) == 1
    assert "✗ GPU: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.10.1", "problem"), ("2.11.0", "ok"), ("2.15.0.dev2026", "ok"), ("2.16.0", "warning"), ("3.0", "warning")],
)
def test_versions_of_torch(version: str, status: str) -> None:
    check = checks.torch_version(version)
    assert check.status == status and (check.remedy is None) is (status == "ok")


def test_an_old_gpu_and_a_missing_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.one_gpu("T4", (7, 5)).status == "problem" and "8.0" in (checks.one_gpu("T4", (7, 5)).remedy or "")
    assert checks.one_gpu("A100", (8, 0)).status == "ok"
    monkeypatch.setitem(__import__("sys").modules, "triton", None)
    assert [checks.triton(device).status for device in ("cpu", "cuda")] == ["info", "problem"]


def test_c_compiler_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    assert checks.compiler("cuda").status == "ok"
    monkeypatch.setenv("CC", "no-such-compiler")
    assert checks.compiler("cuda").status == "problem"


def test_settings_and_variables() -> None:
    with flash_inductor.override(cpu="off", table="off"):
        found = list(checks.settings({"FLASH_INDUCTOR_KERNELS": "gluon", "FLASH_INDUCTOR_XYZZY": "1", "HOME": "/"}))
    assert [(c.name, c.status) for c in found] == [
        ("settings", "info"),
        ("table", "info"),
        ("cpu=off", "warning"),
        ("FLASH_INDUCTOR_KERNELS", "warning"),
        ("FLASH_INDUCTOR_XYZZY", "warning"),
    ]
    assert "cpu='off'" in found[0].text and found[3].remedy == "write FLASH_INDUCTOR_KERNEL"
    assert [c.name for c in checks.settings({"FLASH_INDUCTOR_CPU": "on"})] == ["settings", "table"]


def test_malformed_variables_are_problems(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("flash_inductor.cli.selftest.CASES", {})
    monkeypatch.setenv("FLASH_INDUCTOR_CPU", "maybe")
    monkeypatch.setenv("FLASH_INDUCTOR_MAX_MASK_ELEMENTS", "many")
    assert main(["doctor", "--device", "cpu", "--json"]) == 1
    found = {c["name"]: c for c in json.loads(capsys.readouterr().out)["checks"] if c["status"] == "problem"}
    assert list(found) == ["FLASH_INDUCTOR_CPU", "FLASH_INDUCTOR_MAX_MASK_ELEMENTS"]
    assert found["FLASH_INDUCTOR_CPU"]["text"] == "ignored: expected one of ('on', 'off'), got 'maybe'"
    assert found["FLASH_INDUCTOR_CPU"]["remedy"] == "correct or unset FLASH_INDUCTOR_CPU"


@pytest.mark.parametrize("command", ["demo", "explain no.such:model", "bench", "tune"])
def test_other_commands_do_not_run_with_malformed_variables(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASH_INDUCTOR_ENABLE", "yes")
    assert main(command.split()) == 1
    done = capsys.readouterr()
    assert done.out == "" and done.err.startswith("error: FLASH_INDUCTOR_ENABLE: expected 0, 1, true or false, got")
    assert done.err.endswith("correct or unset it\n")


def test_a_malformed_variable_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "flash_inductor", "explain", "no.such:model"]
    env = {**os.environ, "FLASH_INDUCTOR_ENABLE": "1", "FLASH_INDUCTOR_CPU": "maybe"}
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert "error: FLASH_INDUCTOR_CPU: expected one of" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", checks.TORCH_SWITCHES)
def test_torch_compile_switched_off_is_a_problem(name: str) -> None:
    with flash_inductor.override(table="off"):
        assert [c.status for c in checks.settings({name: "1"})] == ["info", "info", "problem"]
        assert [c.status for c in checks.settings({name: "0"})] == ["info", "info"]


def test_tables(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    with flash_inductor.override(table=str(path)):
        assert checks.table().status == "info"
        tuned.write(path, 90, {"name": "toy"})
        assert checks.table().status == "ok" and "9.0" in checks.table().text
        path.write_text("{}")
        found = checks.table()
    assert found.status == "warning" and "expected an object with format 1" in found.text and found.remedy


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.ops.flashbwd.attn

    def wrong(query: torch.Tensor, *args: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = real(query, *args, **options)
        return out * 1.001, lse

    monkeypatch.setattr(torch.ops.flashbwd, "attn", wrong)
    found = [test() for _, test in selftest.tests("cpu", compile_too=False)]
    assert [c.status for c in found] == ["problem"] * 3
    assert all("exceeds" in c.text and c.remedy == selftest.REPORT for c in found)


def test_a_model_that_is_not_rewritten_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_inductor.cli.selftest.CASES", {})
    monkeypatch.setattr(torch, "compile", lambda model: model)
    (found,) = [test() for _, test in selftest.tests("cpu")]
    assert found.status == "problem" and "left alone: it was not found" in found.text


def test_checks_are_plain_data() -> None:
    assert Check("a", "ok", "b").to_dict() == {"name": "a", "status": "ok", "text": "b", "remedy": None}


@pytest.mark.gpu
def test_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["device"] == "cuda" and any(check["name"].endswith(", triton") for check in data["checks"])
