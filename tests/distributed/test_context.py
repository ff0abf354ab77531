"""Context-parallel attention on 2 and 4 gloo ranks: outputs, gradients, bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from . import cases, pool

RANKS = (2, 4)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.5e-2}
COMPILED = {name for name, case in cases.CASES.items() if case.compiled}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    seed = int(torch.randint(1 << 30, ()))
    print(f"seed {seed}")
    results = {}
    for ranks in RANKS:
        # Compiled on 2 ranks only: what is compiled doesn't depend on their number.
        names = [name for name in cases.CASES if ranks == 2 or name not in COMPILED]
        results[ranks] = pool.run(ranks, _work, tmp_path_factory.mktemp(f"ranks{ranks}"), seed, names)
    return results


def _work(seed: int, names: list[str]) -> dict[str, Any]:
    return {
        "cases": cases.run_all(seed, names),
        "repeats": cases.repeats(seed),
        "unsharded": cases.unsharded(seed),
        "inside_torchs_context": cases.inside_torchs_context(seed),
    }


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", cases.CASES)
def test_ranks_compute_their_rows_of_the_whole(found: dict[int, list[Any]], ranks: int, name: str) -> None:
    case = cases.CASES[name]
    for rank in found[ranks]:
        assert isinstance(rank, dict), rank
        if name in COMPILED and ranks != 2:
            assert name not in rank["cases"]
            continue
        assert set(rank["cases"][name]) == {"out", "lse", *cases.NAMES} - set(case.frozen)
        for what, difference in rank["cases"][name].items():
            assert difference < TOLERANCE[case.dtype], what


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("what", ["repeats", "unsharded", "inside_torchs_context"])
def test_ranks(found: dict[int, list[Any]], ranks: int, what: str) -> None:
    assert [rank[what] for rank in found[ranks]] == [True] * ranks
