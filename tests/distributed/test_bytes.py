"""The bytes that ranks send, as the operating system counts them, are those of the cost model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flash_inductor.distributed import ContextParallel, Problem, Sequence, cost, make_plan
from flash_inductor.distributed.cost import CPU
from flash_inductor.spec import MaskSpec

from . import pool

RANKS = (2, 4, 8)
ROWS = 192  # of each rank
CASES: dict[str, tuple[str, str, MaskSpec]] = {
    "full-ring": ("contiguous", "ring", MaskSpec()),
    "causal-zigzag-ring": ("zigzag", "ring", MaskSpec(upper=0)),
    "causal-zigzag-gather": ("zigzag", "gather", MaskSpec(upper=0)),
    "window-contiguous-ring": ("contiguous", "ring", MaskSpec(lower=-99, upper=0)),
    "window-zigzag-gather": ("zigzag", "gather", MaskSpec(lower=-99, upper=0)),
}
MESSAGE = 256  # bytes around the data of one message between two ranks, at most

pytestmark = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's count of written bytes")


def written() -> int:
    """Bytes that this process has handed to the operating system, here all but a few to sockets."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def count() -> dict[str, tuple[int, int]]:
    """What this rank writes in a forward and in a backward."""
    ranks = dist.get_world_size()
    found = {}
    for name, (layout, method, band) in CASES.items():
        context = ContextParallel(layout=layout, method=method)
        query = torch.randn(1, 2, ROWS, 32, requires_grad=True)
        key, value = (torch.randn(1, 1, ROWS, 32, requires_grad=True) for _ in range(2))
        window = (None if band.lower is None else -band.lower, band.upper)
        for _ in range(2):  # in the first ranks also ask each other whether they mean the same
            dist.barrier()
            start = written()
            out = context.attention(query, key, value, length=ROWS * ranks, window_size=window)
            middle = written()
            out.sum().backward()
        found[name] = (middle - start, written() - middle)
    return found


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    return {ranks: pool.run(ranks, count, tmp_path_factory.mktemp(f"ranks{ranks}")) for ranks in RANKS}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_model(counted: dict[int, list[Any]], ranks: int, name: str) -> None:
    layout, method, band = CASES[name]
    problem = Problem(batch=1, q_heads=2, k_heads=1, head_dim=32, value_dim=32, element_size=4)
    for rank, found in enumerate(counted[ranks]):
        assert isinstance(found, dict), found
        plan = make_plan(Sequence(ROWS * ranks, ranks, layout, band), rank, method)
        exchanges = sum(step.exchanges for step in plan.steps)
        expected = cost(plan, problem, CPU)
        around = MESSAGE * ranks * exchanges
        assert expected.forward_bytes <= found[name][0] <= expected.forward_bytes + around
        assert expected.backward_bytes <= found[name][1] <= expected.backward_bytes + 2 * around


def test_the_bound_tells_the_cases_apart() -> None:
    """Else the test above would say nothing: a row more or less is beyond what it allows."""
    problem = Problem(batch=1, q_heads=2, k_heads=1, head_dim=32, value_dim=32, element_size=4)
    totals = {
        name: cost(make_plan(Sequence(ROWS * 8, 8, layout, band), 3, method), problem, CPU).forward_bytes
        for name, (layout, method, band) in CASES.items()
    }
    assert totals["full-ring"] == 7 * ROWS * problem.bytes_of_row
    assert totals["window-contiguous-ring"] == 99 * problem.bytes_of_row
    assert totals["causal-zigzag-ring"] == totals["causal-zigzag-gather"]
    assert totals["full-ring"] - totals["causal-zigzag-ring"] > 7 * MESSAGE * 8
