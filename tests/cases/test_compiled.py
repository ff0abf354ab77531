"""A sample of the cases through all of Inductor; on a GPU every case.  ``python tests/cases/run.py`` runs all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config as inductor_config

import flash_inductor

from . import CASES
from .book import Case
from .modes import run

# One of each theme, and of what Inductor without the plugin gets wrong.
SAMPLE = [
    "bool_mask_empty_rows", "scale_nonpositive_under_causal", "softmax_other_dim", "scale_is_a_tensor", "sink_column",
    "autocast_sdpa", "other_default_dtype", "kv_cache_written_in_graph",
]  # fmt: skip


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    with inductor_config.patch(fx_graph_cache=False):
        yield
    flash_inductor.disable()


@pytest.mark.parametrize("case", [c for c in CASES if c.name in SAMPLE], ids=lambda c: c.name)
def test_compiled(case: Case) -> None:
    run(case, case.dtypes[0], "compile")


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), [pytest.param(c, d, id=f"{c.name}-{d}") for c in CASES for d in c.dtypes])
def test_compiled_on_a_gpu(case: Case, dtype: str) -> None:
    if case.name == "explicit_round_to_half_in_the_middle" and torch.__version__ < "2.13":
        pytest.xfail("Inductor before 2.13 drops the cast in spite of its switch; the plugin leaves this graph alone")
    run(case, dtype, "compile", "cuda")
