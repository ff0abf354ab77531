"""benchmarks/choices.py: rows of the table from measurements."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from flash_inductor.kernels.choices import Row


@pytest.fixture(scope="module")
def script() -> Any:
    path = Path(__file__).parent.parent / "benchmarks" / "choices.py"
    spec = importlib.util.spec_from_file_location("choices_script", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_are_for_cells_where_the_first_of_the_order_is_behind(script: Any) -> None:
    speeds = {
        512: {"triton": 50.0, "gluon": 100.0, "cudnn": 101.0},
        1024: {"triton": 50.0, "gluon": 100.0, "cudnn": 120.0},
        2048: {"triton": 50.0, "gluon": 100.0, "cudnn": 110.0},
        4096: {"triton": 50.0, "gluon": 100.0, "cudnn": 90.0},
        8192: {"triton": 150.0, "gluon": 100.0, "cudnn": 120.0},
    }
    found = {("fwd", 64, "causal"): speeds, ("bwd", 64, "causal softcap"): {512: {"triton": 5.0}}}
    assert script.rows_of(found, 9) == [
        Row("fwd", 64, "causal", (769, 3072), ("cudnn", "gluon")),
        Row("fwd", 64, "causal", (6145, 1 << 31), ("triton", "cudnn", "gluon")),
    ]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "window_left": 3}])
def test_flops_are_of_visible_pairs(script: Any, options: dict[str, Any]) -> None:
    left = options.get("window_left", 99)
    pairs = sum(not options or 0 <= i - j <= left for i in range(10) for j in range(10))
    assert script.flops("fwd", 2, 3, 10, 8, options) == 4 * 2 * 3 * 8 * pairs
    assert script.flops("bwd", 2, 3, 10, 8, options) == 10 * 2 * 3 * 8 * pairs
