"""The kernels through the Triton interpreter, all cases in one child process."""

from __future__ import annotations

import pytest

from .child import interpret
from .interpreter_cases import CASES


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    return interpret("interpreter_cases.py")


@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name: str, results: dict[str, str]) -> None:
    assert results[name] == "", results[name]


def test_a_wrong_scale_is_noticed(results: dict[str, str]) -> None:
    assert "out: error" in results["control"] and "lse: error" in results["control"]


def test_a_row_of_nan_is_nan_in_both_results(results: dict[str, str]) -> None:
    assert results["nan_row"] == ""
