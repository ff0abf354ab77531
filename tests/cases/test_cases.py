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


SYMBOLIC_HEADS = {"dynamic_lengths"}  # dynamic=True makes the number of heads symbolic too, which is left alone
# One of each theme and all that Inductor without the plugin gets wrong, but what takes a minute (run.py has them).
SAMPLE = [
    "bool_mask_empty_rows", "packed_documents", "window_two_sided_uneven", "scale_nonpositive_under_causal",
    "softcap_gradient", "softmax_other_dim", "scale_is_a_tensor", "sink_column", "mqa_expanded_kv", "autocast_sdpa",
    "no_grad_then_grad", "other_default_dtype", "kv_cache_written_in_graph",
]  # fmt: skip


@pytest.mark.parametrize(("case", "dtype"), ALL)
def test_rewritten(case: Case, dtype: str) -> None:
    with collect() as sites:
        run(case, dtype, "fast")
    if case.fuse == "yes" and case.name not in SYMBOLIC_HEADS:
        assert any(site.replaced for site in sites), [site.describe() for site in sites]


@pytest.mark.parametrize("case", [c for c in CASES if c.name in SAMPLE], ids=lambda c: c.name)
def test_compiled(case: Case) -> None:
    run(case, case.dtypes[0], "compile")


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), ALL)
def test_compiled_on_a_gpu(case: Case, dtype: str) -> None:
    torch._dynamo.reset()
    run(case, dtype, "compile", "cuda")
