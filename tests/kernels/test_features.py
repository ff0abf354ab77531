"""Bias, mask, segments, dropout, sinks and ranges through the Triton interpreter, all cases in one child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .feature_cases import CASES

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    script = Path(__file__).with_name("interpret_features.py")
    child = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=500)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name: str, results: dict[str, str]) -> None:
    assert results[name] == "", results[name]


def test_other_dropped_pairs_are_noticed(results: dict[str, str]) -> None:
    assert all(f"{name}: error" in results["control"] for name in ("out", "grad_query", "grad_key", "grad_value"))
