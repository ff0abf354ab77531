"""tools/versions.py: what it would install and run, without installing anything."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "versions.py"


@pytest.fixture(scope="module")
def versions() -> ModuleType:
    spec = importlib.util.spec_from_file_location("versions", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["versions"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_constraints_pin_this_torch_and_its_triton(versions: ModuleType) -> None:
    lines = versions.constraints("2.11.0")
    assert "torch==2.11.0" in lines and "triton==3.6.0" in lines and any(line.startswith("numpy==") for line in lines)
    assert len([line for line in lines if line.startswith(("torch==", "triton=="))]) == 2
    assert not any(
        line.startswith(("triton", "setuptools")) for line in versions.constraints("9.9.9")
    )  # torch's choice


def test_the_pinned_set_is_one_of_the_versions(versions: ModuleType) -> None:
    pins = dict(
        line.split("==") for line in (versions.ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    assert pins["torch"] in versions.TORCH.values()
    assert versions.TRITON[pins["torch"]] == pins["triton"]


def test_suites_exist(versions: ModuleType) -> None:
    assert all((versions.ROOT / path).exists() for paths in versions.SUITES.values() for path in paths)


def test_arguments(versions: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    args = versions.parse(["--only", "2.12,newest,2.10.0", "--tests", "short", "tests/test_spec.py"])
    assert args.only == ["2.12", "newest", "2.10.0"]
    assert args.tests == [*versions.SUITES["short"], "tests/test_spec.py"]
    assert versions.parse([]).only == [*versions.TORCH, "newest"]
    with pytest.raises(SystemExit):
        versions.parse(["--only", "2.5"])
    assert "got 2.5" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.1", "torch (2.15.0+cpu)\n"])
def test_newest(versions: ModuleType, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    def pip(command: list[str], **options: Any) -> Any:
        assert command[1:] == ["-m", "pip", "index", "versions", "torch"]
        return subprocess.CompletedProcess(command, 0, words, "")

    monkeypatch.setattr(versions.subprocess, "run", pip)
    assert versions.newest("python") == "2.15.0"
    words = ""
    with pytest.raises(RuntimeError, match="pip found no torch"):
        versions.newest("python")


def fake_environment(versions: ModuleType, folder: Path) -> Path:
    """What an environment of torch 2.12 would be: this one."""
    place = folder / f"torch-{versions.TORCH['2.12']}"
    (place / "bin").mkdir(parents=True)
    python = place / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (place / "ready").write_text(versions.wanted(versions.TORCH["2.12"]))
    return place


@pytest.mark.parametrize("good", [True, False])
def test_a_run_with_an_environment_that_is_there(
    versions: ModuleType,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    good: bool,
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    fake_environment(versions, tmp_path)
    tests = tmp_path / "test_it.py"
    tests.write_text(f"def test_one(): assert {good}\ndef test_two(): pass\n")
    code = versions.main(["--only", "2.12", "--keep", str(tmp_path), "--tests", str(tests)])
    last = capfd.readouterr().out
    assert code == (0 if good else 1)
    assert ("2 passed, 0 failed, 0 skipped" if good else "1 passed, 1 failed, 0 skipped") in last
    assert ("test_it::test_one" in last) is not good


def test_an_environment_is_made_once_and_follows_the_pins(
    versions: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, installed = [], []
    monkeypatch.setattr(versions.venv, "create", lambda place, **options: (made.append(place), place.mkdir()))
    monkeypatch.setattr(versions.subprocess, "run", lambda command, **options: installed.append(command))
    place = tmp_path / "torch"
    for _ in range(2):
        assert versions.install(place, "2.12.1") == str(place / "bin" / "python")
    assert all(f'"{name}' in versions.wanted("2.12.1") for name in ("torch>=", "pytest>=", "transformers>="))
    assert len(made) == len(installed) == 1 and "torch==2.12.1" in (place / "constraints.txt").read_text()
    monkeypatch.setattr(versions, "constraints", lambda torch: ["torch==2.12.1", "numpy==9"])
    versions.install(place, "2.12.1")
    assert len(made) == 1 and len(installed) == 2 and "numpy==9" in (place / "constraints.txt").read_text()


def test_a_version_that_cannot_be_installed(
    versions: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: Any) -> str:
        raise subprocess.CalledProcessError(7, "pip")

    monkeypatch.setattr(versions, "install", fails)
    assert versions.main(["--only", "2.12", "--keep", str(tmp_path)]) == 1
    assert "not installed: exit code 7" in capfd.readouterr().out


def test_nothing_run_is_a_failure(versions: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite tests="2" failures="0" errors="0" skipped="2"/></testsuites>')
    row = versions.Row("2.12.1")
    versions.summarise(report, 0, row)
    assert row.failed and row.result == "0 passed, 0 failed, 2 skipped"
