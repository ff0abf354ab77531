"""Launches the backward on Hopper.  Imported only where Gluon can be: see ``hopper.takes``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import triton
from torch import Tensor

from ..kernels.hopper.backward import backward_kernel
from ..kernels.hopper.device import flat_descriptor, row_descriptor, tile_descriptor
from ..spec import MaskSpec
from .hopper import is_ragged, tile_columns
from .hopper_backward_wide import wide_launches
from .hopper_problem import Problem, cdiv, finish, heads_at_once, numbers, prepare, trim
from .launch import Launch

_QUERIES, _KEYS = 64, 128  # of a step and of a block of threads, for head dims up to 128


@dataclass(frozen=True)
class BackwardConfig:
    """Tuning of the kernel for one width; see the kernel for the meaning.  ``heads_at_once`` None: by L2 and length."""

    stages: int
    ds_buffers: int = 2
    ahead: bool = False
    park: bool = False
    main_registers: int = 216
    dq_registers: int = 72
    heads_at_once: int | None = None


# Since 3.8 Triton copies a register operand before each product, and the ptxas that comes with 3.9 (13.4) has no
# registers for P twice: it spills up to 984 bytes a thread and serialises the products.  Parked, at most 200, and none.
_PARK = [int(part) for part in triton.__version__.split(".")[:2]] >= [3, 9]
# By the columns that are computed: those of a head dim in one or two powers of two.
_CONFIGS = {
    (64, 0): BackwardConfig(stages=4),
    (64, 16): BackwardConfig(stages=3),
    (64, 32): BackwardConfig(stages=3, park=_PARK),
    (128, 0): BackwardConfig(stages=3, park=_PARK),
}


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    scratch: Tensor | None = None,
    *,
    scale: float,
    mask: MaskSpec,
    softcap: float | None,
    deterministic: bool,
    config: Any = None,
) -> list[Launch]:
    """What writes the three gradients of ``flashbwd::attn`` on the current device, in order.

    fp16 or bf16 tensors that ``hopper.takes`` and ``hopper.aligned`` hold for, the gradients' included; lse and
    grad_lse fp32 [batch, heads, q_len], contiguous.  ``scratch``: fp32 of ``scratch_size``.  ``deterministic``: the
    same bits in every run; else the sums of grad_query over keys are in no fixed order.  ``config`` overrides the
    tuning: a BackwardConfig, or a WideConfig for head dims above 128.

    Gradients of what sees nothing, or isn't seen, are set to 0 here.
    """
    problem = Problem(
        grad_out, grad_lse, query, key, value, out, lse, grad_query, grad_key, grad_value, scale, mask, softcap,
        deterministic, scratch,
    )  # fmt: skip
    visible = trim(problem)
    return [] if visible is None else launches(visible, config)


def launches(problem: Problem, config: Any = None) -> list[Launch]:
    """What has to be launched for a trimmed problem, in order; ``config`` as in :func:`backward`."""
    width = max(problem.query.shape[3], problem.value.shape[3])
    if width > 128:
        return wide_launches(problem, config)
    return _launches(problem, config)


def columns(width: int) -> tuple[int, int]:
    """Columns that are computed for head dims up to ``width``, at most 128: one power of two, or a second one."""
    return next(parts for parts in _CONFIGS if width <= sum(parts))


def _launches(problem: Problem, config: BackwardConfig | None) -> list[Launch]:
    """Head dims up to 128: ``kernels.hopper.backward``."""
    lower, upper, softcap = problem.mask.lower, problem.mask.upper, problem.softcap
    batch, heads, q_len, head_dim = problem.query.shape
    kv_heads, kv_len, v_head_dim = problem.value.shape[1:]
    c, constants = _main(
        max(head_dim, v_head_dim), lower is not None, upper is not None, is_ragged(q_len, kv_len, upper, _KEYS),
        softcap is not None, problem.deterministic, config,
    )  # fmt: skip
    dim = constants["DIM"]
    scratch, first = prepare(problem)
    even = lower is None and upper is None
    at_once = c.heads_at_once or heads_at_once(batch, heads, kv_heads, q_len, kv_len, dim, even)
    blocks_n = cdiv(kv_len, _KEYS)
    args = (
        tile_descriptor(problem.query, _QUERIES, dim), tile_descriptor(problem.key, _KEYS // 2, dim),
        tile_descriptor(problem.value, _KEYS // 2, dim), tile_descriptor(problem.grad_out, _QUERIES, dim),
        row_descriptor(scratch.lse, _QUERIES), row_descriptor(scratch.delta, _QUERIES),
        flat_descriptor(scratch.grad_query, 16), tile_descriptor(problem.grad_key, _KEYS // 2, dim),
        tile_descriptor(problem.grad_value, _KEYS // 2, dim), scratch.turns,
        *numbers(problem, at_once, blocks_n),
    )  # fmt: skip
    main = Launch(backward_kernel, constants, (blocks_n * batch * kv_heads,), args)
    return [first, main, finish(problem, scratch)]


def _main(
    width: int,
    has_lower: bool,
    has_upper: bool,
    ragged: bool,
    has_softcap: bool,
    deterministic: bool,
    config: BackwardConfig | None,
) -> tuple[BackwardConfig, dict[str, Any]]:
    """The tuning, and the constants for it; ``width`` is the wider head dim."""
    first_part, second_part = columns(width)
    c = config or _CONFIGS[first_part, second_part]
    if config is None and first_part == 64 and not second_part and has_softcap:
        c = replace(c, ahead=True)  # hides the longer way to P: 366 to 380 TFLOP/s at causal 4k instead of 357
    constants = {
        "HAS_LOWER": has_lower, "HAS_UPPER": has_upper, "RAGGED": ragged, "SOFTCAP": has_softcap,
        "DETERMINISTIC": deterministic, "BLOCK_M": _QUERIES, "BLOCK_N": _KEYS,
        "DIM": tile_columns(width), "FIRST": first_part, "SECOND": second_part, "STAGES": c.stages,
        "DS_BUFFERS": c.ds_buffers, "AHEAD": c.ahead, "PARK": c.park or has_softcap,
        "MAIN_REGISTERS": c.main_registers, "DQ_REGISTERS": c.dq_registers, "num_warps": 4,
    }  # fmt: skip
    return c, constants
