"""Launches the backward on Hopper for head dims above 128."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..kernels.hopper.backward_wide import backward_wide_kernel
from ..kernels.hopper.device import flat_descriptor, row_descriptor, tile_descriptor
from .hopper import is_ragged, split
from .hopper_problem import Problem, cdiv, finish, heads_at_once, numbers, prepare
from .launch import Launch

_BLOCK = 64  # keys and queries of a step


@dataclass(frozen=True)
class WideConfig:
    """Tuning; see the kernel for the meaning.

    ``stages`` None: as many as shared memory holds.  ``heads_at_once`` None: by L2 and length.
    """

    stages: int | None = None
    part: int = 64
    slots: int = 1
    ds_in_registers: bool = False
    kv_registers: int = 208
    dq_registers: int = 88
    heads_at_once: int | None = None


# Measured on an H200, D 256 causal at 4k: 442 TFLOP/s (with softcap 451) against 417 (401) of the defaults.  Not for
# the deterministic kernel: it has no registers left for that.
_FAST = WideConfig(part=32, slots=2, ds_in_registers=True)
_DETERMINISTIC = WideConfig()


def wide_launches(problem: Problem, config: WideConfig | None = None) -> list[Launch]:
    """What has to be launched for a trimmed problem, in order: head dims up to 256, one of them above 128."""
    c = config or (_DETERMINISTIC if problem.deterministic else _FAST)
    batch, heads, q_len, head_dim = problem.query.shape
    kv_heads, kv_len, v_head_dim = problem.value.shape[1:]
    dim, v_dim = 256, 128 if v_head_dim <= 128 else 256
    scratch, first = prepare(problem)
    lower, upper, softcap = problem.mask.lower, problem.mask.upper, problem.softcap
    even = lower is None and upper is None
    # It counts blocks of twice as many keys.
    at_once = c.heads_at_once or heads_at_once(batch, heads, kv_heads, q_len, 2 * kv_len, dim, even)
    blocks_n = cdiv(kv_len, _BLOCK)
    args = (
        tile_descriptor(problem.query, _BLOCK, dim), tile_descriptor(problem.key, _BLOCK, dim),
        tile_descriptor(problem.value, _BLOCK, v_dim), tile_descriptor(problem.grad_out, _BLOCK, v_dim),
        row_descriptor(scratch.lse, _BLOCK), row_descriptor(scratch.delta, _BLOCK),
        flat_descriptor(scratch.grad_query, c.part // 4), tile_descriptor(problem.grad_key, _BLOCK, dim),
        tile_descriptor(problem.grad_value, _BLOCK, v_dim), scratch.turns,
        *numbers(problem, at_once, blocks_n),
    )  # fmt: skip
    constants = _constants(
        head_dim, v_head_dim, lower is not None, upper is not None, is_ragged(q_len, kv_len, upper, _BLOCK),
        softcap is not None, problem.deterministic, c,
    )  # fmt: skip
    main = Launch(backward_wide_kernel, constants, (blocks_n * batch * kv_heads,), args)
    return [first, main, finish(problem, scratch)]


def _constants(
    head_dim: int,
    v_head_dim: int,
    has_lower: bool,
    has_upper: bool,
    ragged: bool,
    has_softcap: bool,
    deterministic: bool,
    c: WideConfig,
) -> dict[str, Any]:
    qk, v = _split(head_dim), _split(v_head_dim)
    return {
        "HAS_LOWER": has_lower, "HAS_UPPER": has_upper, "RAGGED": ragged, "SOFTCAP": has_softcap,
        "DETERMINISTIC": deterministic, "QK_FIRST": qk[0], "QK_SECOND": qk[1], "V_FIRST": v[0], "V_SECOND": v[1],
        "STAGES": c.stages or (3 if v_head_dim <= 128 else 2),
        "PARTS": c.slots * -(-head_dim // (c.slots * c.part)), "PART": c.part,
        "SLOTS": c.slots, "DS_IN_REGISTERS": c.ds_in_registers, "KV_REGISTERS": c.kv_registers,
        "DQ_REGISTERS": c.dq_registers, "num_warps": 4,
    }  # fmt: skip


def _split(dim: int) -> tuple[int, int]:
    """A head dim as one or two powers of two, for products that aren't as wide as the tile."""
    if dim <= 128:
        return 128, 0
    return split(dim)
