"""The user's own table: what it may hold, that it decides, that it is part of the cache keys, and faulty files."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_inductor import config
from flash_inductor.kernels.choices import Row
from flash_inductor.kernels.configs import KINDS, Config, configs, known
from flash_inductor.matching.fusion_pass import KEY
from flash_inductor.ops import choice, library, tuned
from flash_inductor.ops.tiles import tile_configs

ROW: dict[str, Any] = {
    "kind": "fwd",
    "head_dim": 128,
    "band": "causal",
    "softcap": False,
    "lengths": [0, 2048],
    "kernels": ["cudnn", "triton"],
}
TILES = {"kind": "dq", "head_dim": 128, "tiles": [[64, 32, 4, 3]]}


@pytest.fixture(autouse=True)
def read_anew() -> Iterator[None]:
    tuned.forget()
    with config.override(strict=True, table="off"):
        yield
    tuned.forget()


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Path]:
    """A table for compute capability 9.0 in force."""
    path = tmp_path / "table.json"
    tuned.write(path, 90, {"name": "toy", "kernels": [ROW], "tiles": [TILES]})
    with config.override(table=str(path)):
        yield path


def problem(length: int = 1024, capability: int = 90, **changes: Any) -> choice.Problem:
    return choice.Problem("fwd", capability, torch.bfloat16, 128, 128, (length, length), "causal", True)._replace(
        **changes
    )


def test_kernels_by_the_users_table(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_gluon_takes", lambda *_: False)
    monkeypatch.setattr(choice, "_cudnn", lambda: 91900)
    choice.choose.cache_clear()
    mine = tuned.current()
    assert mine.kernels == {90: (Row("fwd", 128, "causal", (0, 2048), ("cudnn", "triton")),)}
    assert choice.choose(problem(), "auto", mine) == "cudnn"
    assert choice.choose(problem(), "triton", mine) == "triton"
    assert choice.choose(problem()) == choice.choose(problem(4096), "auto", mine) == "triton"
    assert choice.choose(problem(band="full"), "auto", mine) == "triton"
    assert choice.choose(problem(dtype=torch.float32), "auto", mine) == "triton"  # a row says nothing of what is taken
    assert choice.choose(problem(capability=80), "auto", mine) == "flash"
    choice.choose.cache_clear()


def test_tiles_by_the_users_table(table: Path) -> None:
    mine = tile_configs("dq", 90, 128, 128, 2)
    package = configs("dq", 90, 128, 128, 2)
    assert mine[0] == Config(64, 32, 4, 3) != package[0]
    assert set(mine) == set(package) and len(mine) == len(package)
    assert tile_configs("dq", 90, 64, 64, 2) == configs("dq", 90, 64, 64, 2)
    assert tile_configs("dq", 90, 128, 128, 4) == configs("dq", 90, 128, 128, 4)  # 16 bits were measured
    assert tile_configs("dq", 80, 128, 128, 2) == configs("dq", 80, 128, 128, 2)
    assert tile_configs("dq", 90, 128, 128, 2, 40_000)[0] != Config(64, 32, 4, 3)  # no room for it
    with config.override(kernel_options={"dq": {"num_warps": 8}}):
        assert tile_configs("dq", 90, 128, 128, 2) == (Config(64, 32, 8, 3),)


def test_what_the_table_says_is_part_of_the_cache_keys(table: Path) -> None:
    first = KEY.uuid()
    tuned.write(table, 90, {"name": "toy", "kernels": [{**ROW, "lengths": [0, 4096]}]})
    assert KEY.uuid() == first  # read once: nothing changes under a running process
    tuned.forget()
    second = KEY.uuid()
    assert second != first
    tuned.write(table, 90, {"name": "toy", "kernels": [ROW], "tiles": [TILES]})
    tuned.forget()
    assert KEY.uuid() == first
    with config.override(table="off"):
        assert KEY.uuid()[3] == "" != first[3]


def test_other_gpus_stay_when_one_is_written(table: Path, caplog: pytest.LogCaptureFixture) -> None:
    tuned.write(table, 80, {"name": "other", "tiles": []})
    assert json.loads(table.read_text())["gpus"].keys() == {"90", "80"}
    table.write_text("{")
    tuned.write(table, 80, {"name": "other"})
    assert json.loads(table.read_text())["gpus"].keys() == {"80"} and "is written anew" in caplog.text
    assert [p.name for p in table.parent.iterdir()] == ["table.json"]


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ([], r"gpus\['90'\]: expected an object"),
        ({"kernels": {}}, r"\['kernels'\]: expected a list"),
        ({"kernels": [{**ROW, "kernels": ["cutlass"]}]}, "expected names out of"),
        ({"kernels": [{**ROW, "kernels": []}]}, "expected names out of"),
        ({"kernels": [{**ROW, "lengths": [1]}]}, "expected the first and the last length"),
        ({"kernels": [{**ROW, "lengths": [0, 1.5]}]}, "expected the first and the last length"),
        ({"kernels": [{**ROW, "head_dim": 96}]}, r"\['head_dim'\]: expected one of \(64, 128, 256\), got 96"),
        ({"kernels": [{**ROW, "band": "banded"}]}, r"\['band'\]: expected one of"),
        ({"kernels": [{**ROW, "softcap": 0}]}, r"\['softcap'\]: expected one of \(False, True\), got 0"),
        ({"kernels": [{"kind": "fwd"}]}, r"\['kernels'\]: expected a list, got None"),
        ({"tiles": [{**TILES, "kind": "forward"}]}, r"\['kind'\]: expected one of"),
        ({"tiles": [{**TILES, "tiles": [[64, 64, 4]]}]}, "expected \\[block_m, block_n"),
        ({"tiles": [{**TILES, "tiles": [[64, 64, 4, 17]]}]}, "none of the tiles that the package knows for dq"),
    ],
)
def test_faults_are_named(gpu: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tuned.parse(json.dumps({"format": 1, "gpus": {"90": gpu}}))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2, "gpus": {}}', '{"format": 1}', '{"format": 1, "gpus": {"x": {}}}']
)
def test_what_is_no_table(text: str) -> None:
    with pytest.raises(ValueError):
        tuned.parse(text)


def test_a_faulty_file_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "table.json"
    path.write_text("no json")
    with config.override(table=str(path), strict=False), caplog.at_level(logging.WARNING, "flash_inductor"):
        assert tuned.current() is tuned.current() is tuned.NONE
        tuned.forget()
        with config.override(strict=True), pytest.raises(ValueError, match=r"is not used: .*; make it again"):
            tuned.current()
    assert caplog.text.count("is not used") == 1 and str(path) in caplog.text
    with config.override(table=str(tmp_path / "none.json")), caplog.at_level(logging.WARNING, "flash_inductor"):
        assert tuned.current() is tuned.NONE and "flash-inductor tune makes one" in caplog.text


def test_place_of_the_table() -> None:
    assert config.table_path(config.Config()) == Path.home() / ".cache" / "flash_inductor" / "table.json"
    assert config.table_path(config.Config(table="off")) is None
    assert config.table_path(config.Config.from_env({"FLASH_INDUCTOR_TABLE": "/x.json"})) == Path("/x.json")


def test_every_tile_of_every_table_is_known() -> None:
    for kind in KINDS:
        for capability in (80, 90, 100, 120):
            for dim in (64, 128, 256):
                for itemsize in (2, 4):
                    assert set(configs(kind, capability, dim, dim, itemsize)) <= set(known(kind, dim))


def test_a_call_prepared_under_one_table_is_prepared_again_under_another() -> None:
    prepared: list[str] = []

    def prepare(kind: str, tensors: object, options: object) -> Any:
        prepared.append(config.get_config().table)
        return lambda *args: None

    calls = library._Calls("fwd", prepare)
    inputs = [torch.randn(1, 1, 8, 16) for _ in range(3)]
    for table in ("off", "off", "/nowhere/table.json", "off"):
        with config.override(table=table):
            calls(inputs, {})
    assert prepared == ["off", "/nowhere/table.json"]
