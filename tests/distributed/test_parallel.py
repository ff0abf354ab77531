"""Tensor, sequence and data parallel training steps under torch.compile, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest

from . import pool, steps


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return pool.run(2, steps.run_all, tmp_path_factory.mktemp("ranks"), list(steps.CASES))


@pytest.mark.parametrize("name", steps.CASES)
def test_a_step_of_two_ranks_is_that_of_one_process(found: list[Any], name: str) -> None:
    for rank in found:
        assert isinstance(rank, dict), rank
        assert rank[name]["loss"] < 1e-5
        assert rank[name]["grads"] < 1e-4
        if name != "tensor_parallel_dtensor":  # which calls the op itself
            assert rank[name]["replaced"] and all(rank[name]["replaced"])


@pytest.mark.parametrize("name", ["tensor_parallel", "tensor_and_sequence_parallel"])
def test_the_plugin_adds_no_collective(found: list[Any], name: str) -> None:
    for rank in found:
        counts = rank[name]["counts"]
        assert counts["stock"] and counts["plugin"] == counts["stock"]


@pytest.mark.parametrize("name", ["tensor_parallel_inductor", "tensor_parallel_dtensor"])
def test_neither_does_inductor_nor_attention_of_dtensors(found: list[Any], name: str) -> None:
    for rank in found:
        assert rank[name]["counts"]["plugin"] == rank["tensor_parallel"]["counts"]["stock"]
