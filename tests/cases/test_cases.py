"""Every case through the pass and AOTAutograd, and a fair sample through all of Inductor.

``python tests/cases/run.py`` runs every case through Inductor, ``--device cuda`` on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import flash_inductor
from flash_inductor.report import collect

from . import CASES
from .book import Case
from .modes import run

ALL = [pytest.param(c, d, id=f"{c.name}-{d}") for c in CASES for d in c.dtypes if not c.heavy]


@pytest.fixture(autouse=True)
def switched_off() -> Iterator[None]:
    yield
    flash_inductor.disable()


@pytest.mark.parametrize(("case", "dtype"), ALL)
def test_rewritten(case: Case, dtype: str) -> None:
    with collect() as sites:
        run(case, dtype, "fast")
    assert case.fuse != "yes" or any(site.replaced for site in sites), [site.describe() for site in sites]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), ALL)
def test_compiled_on_a_gpu(case: Case, dtype: str) -> None:
    torch._dynamo.reset()
    run(case, dtype, "compile", "cuda")
