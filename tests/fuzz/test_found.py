"""Graphs that fuzzing has found to be replaced wrongly, and that are right now."""

from __future__ import annotations

import pytest
import torch

from .spellings import Spelling
from .test_graphs import check

LOWEST = torch.finfo(torch.float64).min
PLAIN = {
    "sizes": "square", "product": "matmul", "layout": "bhnd", "scale": "mul", "heads": "plain", "mask": "none",
    "hiding": "fill", "fill": LOWEST, "softcap": False, "softmax": "function", "dropout": "none", "result": "bhnd",
}  # fmt: skip
FOUND = {
    "probabilities rounded to float32": ({}, {"probabilities: rounded"}),
    "integers added, then scaled, in float32": ({}, {"raw scores: added in place"}),
    "integers added, scaled, and a mask": (
        {"mask": "segments", "hiding": "subtract", "heads": "repeat_interleave"}, {"raw scores: added in place"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("how", "changed"), FOUND.values(), ids=FOUND)
def test_found(how: dict[str, object], changed: set[str]) -> None:
    assert check(Spelling(**(PLAIN | how)), frozenset(changed), 0) is not None  # type: ignore[arg-type]
