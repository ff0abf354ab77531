"""Bias, mask, segments, dropout, sinks and ranges through the Triton interpreter, all cases in one child process."""

from __future__ import annotations

import pytest

from .child import interpret
from .feature_cases import CASES


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    return interpret("interpret_features.py")


@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name: str, results: dict[str, str]) -> None:
    assert results[name] == "", results[name]


def test_other_dropped_pairs_are_noticed(results: dict[str, str]) -> None:
    assert all(f"{name}: error" in results["control"] for name in ("out", "grad_query", "grad_key", "grad_value"))
