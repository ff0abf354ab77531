"""The op on DTensors: every placement it takes, with all optional tensors, and an error for the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from . import dtensors, pool


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    seed = int(torch.randint(1 << 30, ()))
    print(f"seed {seed}")
    return pool.run(2, dtensors.run_all, tmp_path_factory.mktemp("ranks"), seed)


@pytest.mark.parametrize("name", dtensors.CASES)
def test_ranks_compute_what_one_process_does_and_send_nothing(found: list[Any], name: str) -> None:
    for rank in found:
        assert isinstance(rank, dict), rank
        case = rank["cases"][name]
        assert {"out", "lse", "query", "key", "value"} <= set(case["differences"])
        for what, difference in case["differences"].items():
            assert difference < 1e-11, what
        assert case["sent"] == [0, 0]


@pytest.mark.parametrize(
    ("name", "partial"),
    [
        ("heads", []),
        ("one_kv_head", ["key", "value"]),
        ("bias_of_heads", []),
        ("bias_shared_by_heads", ["bias"]),
        ("bias_shared_by_batch", ["bias"]),
        ("sinks_of_heads", []),
        ("sinks_of_batch", ["sinks"]),
    ],
)
def test_gradients_of_what_ranks_share_are_sums_yet_to_be_made(found: list[Any], name: str, partial: list[str]) -> None:
    assert [rank["cases"][name]["partial"] for rank in found] == [partial] * 2


@pytest.mark.parametrize("name", dtensors.REFUSED)
def test_other_dtensors_are_refused(found: list[Any], name: str) -> None:
    for rank in found:
        assert isinstance(rank, dict), rank
        assert dtensors.REFUSED[name][2] in rank["refused"][name]
