"""The Hopper backward for head dims above 128: compiled for sm_90a, and its logic in the emulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_inductor.kernels import hopper as package
from flash_inductor.ops.hopper_backward_wide import WideConfig, wide_launches
from flash_inductor.ops.hopper_problem import Launch, Problem, trim
from flash_inductor.reference import attention_forward
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.testing import assert_close_to_reference, make_inputs

from .gluon_emulator import Descriptor, Pointer, launch, load
from .pretend import compile_for_hopper
from .test_compile import check_hopper, resources

_LOG2E = 1.4426950408889634
_IN_REGISTERS = WideConfig(part=32, slots=2, ds_in_registers=True)
_TWO_SLOTS = WideConfig(part=32, slots=2)


def _problem(
    q_len: int, kv_len: int, heads: int, dims: tuple[int, int], mask: MaskSpec, softcap: float | None,
    deterministic: bool, dtype: torch.dtype,
) -> Problem:  # fmt: skip
    query, key, value = make_inputs(
        "bnhd", batch=1, heads=heads, kv_heads=1, q_len=q_len, kv_len=kv_len, head_dim=dims[0], v_head_dim=dims[1],
        dtype=dtype,
    )  # fmt: skip
    scale = dims[0] ** -0.5
    out, lse = attention_forward(query, key, value, AttentionSpec(scale, mask, softcap))
    grad_query, grad_key, grad_value = (torch.full_like(x, torch.nan) for x in (query, key, value))
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return Problem(
        grad_out, None, query, key, value, out.to(dtype), lse.float(), grad_query, grad_key, grad_value, scale, mask,
        softcap, deterministic,
    )  # fmt: skip


# name: (head dims, lower, upper, softcap, length of keys, dtype, deterministic, config)
_COMPILED: dict[str, tuple[tuple[int, int], int | None, int | None, float | None, int, torch.dtype, bool, Any]] = {
    "256_causal": ((256, 256), None, 0, None, 512, torch.bfloat16, False, None),
    "gemma": ((256, 256), -200, 0, 50.0, 500, torch.bfloat16, False, None),
    "fp16_deterministic": ((256, 256), -200, 0, 50.0, 500, torch.float16, True, None),
    "192_128": ((192, 128), None, None, None, 512, torch.bfloat16, False, None),
    "in_registers": ((256, 256), None, 0, 50.0, 500, torch.bfloat16, False, _IN_REGISTERS),
}


@pytest.mark.parametrize("name", _COMPILED)
def test_compiles(name: str) -> None:
    dims, lower, upper, softcap, kv_len, dtype, deterministic, config = _COMPILED[name]
    problem = trim(_problem(512, kv_len, 1, dims, MaskSpec(lower, upper), softcap, deterministic, dtype))
    assert problem is not None
    main = wide_launches(problem, config)[1]
    found = resources(compile_for_hopper(main.kernel, main.args, main.constants))
    check_hopper(found, 0)


# name: (q_len, kv_len, query heads, head dims, band, softcap, deterministic, config)
_EMULATED: dict[str, tuple[int, int, int, tuple[int, int], MaskSpec, float | None, bool, Any]] = {
    "full": (256, 192, 2, (256, 256), MaskSpec(), None, False, None),
    "causal": (256, 256, 2, (256, 256), MaskSpec(upper=0), None, False, _TWO_SLOTS),
    "ragged_softcap": (200, 333, 1, (256, 256), MaskSpec(upper=133), 5.0, False, _IN_REGISTERS),
    "value_128": (300, 300, 1, (192, 128), MaskSpec(-100, 0), None, False, None),
    "odd_parts": (300, 130, 2, (160, 160), MaskSpec(upper=-170), 2.0, False, _TWO_SLOTS),
    "both_sides": (100, 300, 1, (136, 256), MaskSpec(-30, 40), 2.0, False, None),
    "one_query": (1, 300, 2, (256, 256), MaskSpec(), None, False, None),
    "one_key": (300, 1, 2, (64, 136), MaskSpec(upper=0), None, False, _IN_REGISTERS),
    "blind": (400, 100, 2, (256, 256), MaskSpec(-5, 5), None, False, None),
    "three_stages": (300, 300, 1, (256, 256), MaskSpec(upper=0), None, False, WideConfig(stages=3)),
    "deterministic": (200, 300, 2, (256, 256), MaskSpec(), None, True, None),
    "deterministic_causal": (300, 300, 2, (256, 256), MaskSpec(upper=0), None, True, None),
    "deterministic_window": (400, 400, 2, (256, 256), MaskSpec(-100, 0), 5.0, True, _TWO_SLOTS),
}


@pytest.mark.parametrize("name", _EMULATED)
def test_emulated(name: str) -> None:
    q_len, kv_len, heads, dims, mask, softcap, deterministic, config = _EMULATED[name]
    problem = _problem(q_len, kv_len, heads, dims, mask, softcap, deterministic, torch.bfloat16)
    seen = trim(problem)
    assert seen is not None
    _emulate(seen, wide_launches(seen, config)[1])
    grads = (problem.grad_query, problem.grad_key, problem.grad_value)
    assert_close_to_reference(
        [None, None, *grads], problem.query, problem.key, problem.value,
        AttentionSpec(problem.scale, mask, softcap), grad_out=problem.grad_out,
    )  # fmt: skip
    unseen = slice(kv_len if mask.upper is None else q_len + mask.upper, None)
    assert not problem.grad_key[:, :, unseen].any() and not problem.grad_value[:, :, unseen].any()


def _emulate(problem: Problem, main: Launch) -> None:
    """``main`` and, in plain torch, what runs before and after it."""
    lse, delta, acc, turns = main.args[4].base, main.args[5].base, main.args[6].base, main.args[9]
    q_len, head_dim = problem.query.shape[2:]
    for x in (lse, delta, acc):
        x.zero_()
    rows = problem.lse.flatten(0, 1)
    lse[:, :q_len] = torch.where(rows == -torch.inf, 0.0, rows * _LOG2E)
    delta[:, :q_len] = (problem.out.float() * problem.grad_out.float()).sum(-1).flatten(0, 1)
    if turns is not None:
        turns.zero_()
    folder = Path(package.__path__[0])
    names = load(folder / "wide_pieces.py", folder / "backward_wide.py")
    descriptors = [Descriptor(x.base, x.block_shape) for x in main.args[:9]]
    constants = {k: v for k, v in main.constants.items() if k != "num_warps"}
    arguments = (*descriptors, None if turns is None else Pointer(turns), *main.args[10:])
    launch(names["backward_wide_kernel"], main.grid[0], *arguments, **constants)
    grad = _in_order(acc, lse.shape[0], lse.shape[1])[:, :q_len, :head_dim]
    problem.grad_query.copy_((grad * problem.scale).unflatten(0, problem.query.shape[:2]))


def _in_order(acc: Tensor, row_heads: int, q_rows: int) -> Tensor:
    """The accumulator as [batch * heads, rows, columns], see ``around.finish_kernel``."""
    tiles = acc.view(row_heads, q_rows // 64, 4, 8, 4, 8, 4, 2, 2)
    return tiles.permute(0, 1, 4, 7, 5, 2, 3, 6, 8).reshape(row_heads, q_rows, 256)
