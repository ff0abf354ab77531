"""benchmarks/zoo is imported as ``zoo``, as benchmarks/coverage.py does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flash_inductor.config import override

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """An error in the matcher fails the test instead of leaving the graph as it was."""
    with override(strict=True):
        yield
