"""flash-inductor tune: which cases are measured, what is made of times, and that there is nothing to do on a CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_inductor import config
from flash_inductor.bench import ranking, tuning
from flash_inductor.bench.case import Case
from flash_inductor.bench.timing import CpuClock
from flash_inductor.cli import main, tune
from flash_inductor.kernels.configs import Config, configs
from flash_inductor.ops import choice, tuned


@pytest.fixture(autouse=True)
def read_anew() -> Iterator[None]:
    tuned.forget()
    yield
    tuned.forget()


def test_on_a_cpu_there_is_nothing_to_tune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune"]) == 2
    assert capsys.readouterr().err.startswith("error: there is nothing to tune on a CPU")


def test_cases() -> None:
    found = tune.cases([64, 128], [512, 4096], ["full", "window", "softcap"], 16384, 2048, 512)
    assert len(found) == 2 * (2 + 1 + 2)  # a window as long as the sequence is none
    assert {str(c) for c in found} >= {
        "B32 H32/32 N512 D64 full bnhd",
        "B4 H16/16 N4096 D128 causal window 512 bnhd",
        "B4 H16/16 N4096 D128 causal softcap 50 bnhd",
    }


def measured_kernels(case: Case, clock: Any, ms: float, say: Any) -> Iterator[ranking.Measured]:
    """Gluon is the fastest at short lengths only; the backward has but one kernel."""
    slow = case.length > 1024
    yield ranking.Measured("fwd", case.head_dim, "causal", False, case.length, {"gluon": 1.0 + slow, "triton": 1.5})
    yield ranking.Measured("bwd", case.head_dim, "causal", False, case.length, {"triton": 1.0})
    say("gluon: [broken] for this")


def measured_tiles(
    case: Case, clock: Any, ms: float, say: Any, offer: Any
) -> Iterator[tuple[str, dict[Config, float]]]:
    first, second = configs("dq", 90, 64, 64, 2)[:2]
    yield "dq", {first: 2.0, second: 1.0}
    yield "dkdv", {}


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A GPU that isn't there, with times that aren't measured; where the table is to be."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Toy 9000")
    monkeypatch.setattr(choice, "device_limits", lambda index: (90, None))
    monkeypatch.setattr(tuning, "kernels", measured_kernels)
    monkeypatch.setattr(tuning, "tiles", measured_tiles)
    monkeypatch.setattr("flash_inductor.bench.timing.GpuClock", CpuClock)
    return tmp_path / "folder" / "table.json"


def test_what_is_fastest_is_written_and_then_read(pretended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "tune",
        "--head-dim",
        "64",
        "--length",
        "1024",
        "4096",
        "--features",
        "causal",
        "--out",
        str(pretended),
    ]
    assert main([*arguments, "--json"]) == 0
    done = capsys.readouterr()
    gpu = json.loads(done.out)
    rows = [(row["kind"], row["lengths"], row["kernels"]) for row in gpu["kernels"]]
    assert rows == [
        ("fwd", [0, 2048], ["gluon", "triton"]),
        ("fwd", [2049, ranking.LONGEST], ["triton", "gluon"]),
    ]
    first, second = configs("dq", 90, 64, 64, 2)[:2]
    assert gpu["tiles"] == [{"kind": "dq", "head_dim": 64, "tiles": [list(second), list(first)]}]
    assert gpu["name"] == "Toy 9000" and f"FLASH_INDUCTOR_TABLE={pretended}" in done.err
    assert "gluon: [broken] for this" in done.err
    with config.override(table=str(pretended), strict=True):
        assert tuned.current().tiles == {(90, "dq", 64): (second, first)}

        # only a part anew: the other stays
        assert main(["tune", "--only", "tiles", "--head-dim", "64", "--features", "causal"]) == 0
        assert "to use it" not in capsys.readouterr().out
        assert json.loads(pretended.read_text())["gpus"]["90"]["kernels"] == gpu["kernels"]


def test_nothing_that_works_is_exit_code_1(
    pretended: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "kernels", lambda *_: iter(()))
    monkeypatch.setattr(tuning, "tiles", lambda *_: iter(()))
    assert main(["tune", "--out", str(pretended)]) == 1
    assert "nothing could be measured" in capsys.readouterr().out and not pretended.exists()
    with config.override(table="off"):
        assert main(["tune"]) == 2
    assert "Config.table is off" in capsys.readouterr().err


def test_calls_that_refuse_fail_or_differ_are_left_out() -> None:
    def raising(error: Exception) -> Any:
        def call() -> Any:
            raise error

        return call

    said: list[str] = []
    found = tuning.times(
        {
            "refuses": raising(NotImplementedError("no softcap")),
            "fails": raising(RuntimeError("broken")),
            "right": lambda: [torch.ones(3)],
            "wrong": lambda: [torch.zeros(3)],
            "rounded": lambda: [torch.full((3,), 1.001)],
        },
        CpuClock(),
        0.1,
        said.append,
    )
    assert found.keys() == {"right", "rounded"}
    assert said == ["fails: RuntimeError: broken", "wrong: other results than the first"]
    with pytest.raises(torch.OutOfMemoryError):
        tuning.times({"large": raising(torch.OutOfMemoryError("no"))}, CpuClock(), 0.1, said.append)


def test_every_tile_is_offered_once_the_packages_first() -> None:
    found = tuning.every("fwd", 90, 128, 2, 232_448)
    mine = configs("fwd", 90, 128, 128, 2, 232_448)
    assert found[: len(mine)] == mine and len(set(found)) == len(found) > len(mine)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    sizes = ["--head-dim", "64", "--length", "256", "--features", "causal", "--tokens", "1024", "--width", "256"]
    assert main(["tune", *sizes, "--ms", "2", "--out", str(path)]) == 0
    capability = choice.device_limits(0)[0]
    with config.override(table=str(path), strict=True):
        table = tuned.current()
        assert {kind for _, kind, _ in table.tiles} == {"fwd", "dq", "dkdv"}
        assert table.order(capability, "fwd", (64, 64), "causal", 256, False)
        shape = (1, 4, 256, 64)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        torch.ops.flashbwd.attn(q, k, v, is_causal=True)[0].sum().backward()
        assert q.grad is not None and q.grad.isfinite().all()
