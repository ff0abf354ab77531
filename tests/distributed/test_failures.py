"""A rank that fails: an error on all of them within the group's timeout, and no hang."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flash_inductor.distributed import ContextParallel, run

from . import pool

TIMEOUT = 6.0  # seconds that a collective waits for the others


def nothing() -> None:
    pass


def attend(rows: int = 16, method: str = "auto", before: Any = nothing) -> torch.Tensor:
    """``before``: what rank 1 does when the others attend already."""
    context = ContextParallel(impatient_group(), method=method)
    inputs = [torch.randn(1, 2, rows, 8, requires_grad=True) for _ in range(3)]
    if dist.get_rank() == 1:
        before()
    return context.attention(*inputs, is_causal=True)


def impatient_group() -> Any:
    """All ranks; only what is tested has the short timeout, not that they meet on a busy machine."""
    dist.barrier()
    group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT))
    dist.barrier()
    return group


def never_comes() -> None:
    attend(before=lambda: time.sleep(2.5 * TIMEOUT))


def raises_before() -> None:
    def fail() -> None:
        raise ArithmeticError("the model of this rank is broken")

    attend(before=fail)


def dies_in_the_middle(backward: bool) -> None:
    """The process of rank 1 is gone after a part of its work."""
    name = "attn_backward" if backward else "attn"
    original = getattr(run, name)
    calls = []

    def dying(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if dist.get_rank() == 1 and len(calls) == 2:
            os._exit(7)
        return original(*args, **options)

    setattr(run, name, dying)
    attend(method="ring").sum().backward()


def has_another_length() -> None:
    attend(rows=16 if dist.get_rank() == 0 else 15)


def has_too_few_rows() -> None:
    context = ContextParallel(impatient_group())
    context.attention(*(torch.randn(1, 2, 16, 8) for _ in range(3)), length=33)


def needs_another_gradient() -> None:
    context = ContextParallel(impatient_group())
    query, key, value = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    key.requires_grad_(dist.get_rank() == 0)
    context.attention(query, key, value).sum().backward()


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    found = pool.run(2, never_comes, tmp_path)
    # The late one finds the others gone, or runs into the timeout itself.
    assert [x.kind for x in found] == ["RuntimeError", "RuntimeError"], found


def test_a_rank_that_raises(tmp_path: Path) -> None:
    found = pool.run(4, raises_before, tmp_path)
    assert [x.kind for x in found] == ["RuntimeError", "ArithmeticError", "RuntimeError", "RuntimeError"], found


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_rank_that_dies_in_the_middle(tmp_path: Path, backward: bool) -> None:
    found = pool.run(4, dies_in_the_middle, tmp_path, backward)
    assert found[1] == 7
    assert [found[rank].kind for rank in (0, 2, 3)] == ["RuntimeError"] * 3, found


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (has_another_length, "length: expected the same on all ranks, got [32, 30] on ranks 0 to 1"),
        (has_too_few_rows, "query: expected 17 positions, the share of rank 0 of 2 of a sequence of 33"),
        (needs_another_gradient, "gradients asked for: expected the same on all ranks"),
    ],
)
def test_ranks_that_mean_different_calls(tmp_path: Path, function: Any, message: str) -> None:
    found = pool.run(2, function, tmp_path)
    assert found[0].kind == "ValueError" and message in found[0].message, found
    assert isinstance(found[1], pool.Failure), found
