"""Every case through the pass and AOTAutograd; test_compiled.py has a sample through all of Inductor.

``python tests/cases/run.py`` runs every case through Inductor, ``--device cuda`` on a GPU.
"""

from __future__ import annotations

import pytest

from flash_inductor.report import collect

from . import CASES
from .book import Case
from .modes import run

ALL = [pytest.param(c, d, id=f"{c.name}-{d}") for c in CASES for d in c.dtypes if not c.heavy]


@pytest.mark.parametrize(("case", "dtype"), ALL)
def test_rewritten(case: Case, dtype: str) -> None:
    with collect() as sites:
        run(case, dtype, "fast")
    if case.fuse == "yes":
        assert any(site.replaced for site in sites), [site.describe() for site in sites]
