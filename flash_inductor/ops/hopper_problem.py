"""One Hopper backward without what sees nothing, and what surrounds its main kernel, for every width.

Imported only where Gluon can be: see ``hopper.takes``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.hopper.around import finish_kernel, prepare_kernel
from ..spec import MaskSpec
from .hopper import LOG2E, tile_columns
from .launch import Launch

_ROWS = 128  # rows of query that scratch tensors are rounded up to
_L2_BYTES = 28 << 20  # what the heads that are worked on together may take of the second level cache (50 MiB)
_WAVES = 256  # CTAs of unequal length that fill the 132 SMs evenly when the longest start first


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class Problem(NamedTuple):
    """One backward in which every query sees a key and every key is seen by a query.

    Tensors as for ``hopper_backward.backward``; lse and grad_lse may have any stride between heads.  The band holds
    only bounds that hide something.
    """

    grad_out: Tensor
    grad_lse: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor
    scale: float
    mask: MaskSpec
    softcap: float | None
    deterministic: bool
    scratch: Tensor | None = None  # fp32, at least of ``scratch_size``; None to allocate it

    @property
    def q_rows(self) -> int:
        """Rows of query in scratch tensors."""
        return cdiv(self.query.shape[2], _ROWS) * _ROWS


class Scratch(NamedTuple):
    """fp32: lse in log2 units and delta [batch * heads, q_rows], dQ's accumulator [n, 256]; int32 turns or None."""

    lse: Tensor
    delta: Tensor
    grad_query: Tensor
    turns: Tensor | None


def trim(problem: Problem) -> Problem | None:
    """The problem without queries that see nothing and keys that nobody sees, whose gradients are set to 0.

    None if nothing is left.  The kernel never reads what is cut off: what is not finite there can't leak.
    """
    q_len, kv_len = problem.query.shape[2], problem.key.shape[2]
    (q_begin, q_end, k_begin, k_end), lower, upper = _visible(q_len, kv_len, problem.mask.lower, problem.mask.upper)
    if (lower, upper) != (problem.mask.lower, problem.mask.upper):
        problem = problem._replace(mask=MaskSpec(lower, upper))
    if (q_begin, q_end, k_begin, k_end) == (0, q_len, 0, kv_len):
        return problem if problem.query.numel() and problem.key.numel() else None
    for grads, begin, end in (
        ((problem.grad_query,), q_begin, q_end),
        ((problem.grad_key, problem.grad_value), k_begin, k_end),
    ):
        for grad in grads:
            grad[:, :, :begin].zero_()
            grad[:, :, end:].zero_()
    if q_begin == q_end or problem.query.numel() == 0 or problem.key.numel() == 0:
        return None
    names = {
        (q_begin, q_end): ("grad_out", "grad_lse", "query", "out", "lse", "grad_query"),
        (k_begin, k_end): ("key", "value", "grad_key", "grad_value"),
    }
    if (q_begin, q_end) == (k_begin, k_end):
        names = {(q_begin, q_end): sum(names.values(), ())}
    changed: dict[str, Any] = {}
    for (begin, end), group in names.items():
        for name in group:
            x = getattr(problem, name)
            changed[name] = None if x is None else x[:, :, begin:end]
    return problem._replace(**changed)


def _visible(
    q_len: int, kv_len: int, lower: int | None, upper: int | None
) -> tuple[tuple[int, int, int, int], int | None, int | None]:
    """(first query that sees a key, end, first key that is seen, end), and the band counted from these."""
    low = -q_len if lower is None else max(lower, -q_len)
    high = kv_len if upper is None else min(upper, kv_len)
    q_begin, q_end = max(0, -high), min(q_len, kv_len - low)
    k_begin, k_end = max(0, low), min(kv_len, q_len + high)
    if low > high or q_begin >= q_end or k_begin >= k_end:
        return (0, 0, 0, 0), None, None
    low, high = low + q_begin - k_begin, high + q_begin - k_begin
    rows, cols = q_end - q_begin, k_end - k_begin
    spans = (q_begin, q_end, k_begin, k_end)
    return spans, low if low > -(rows - 1) else None, high if high < cols - 1 else None


def scratch_size(query: Tensor, value: Tensor, deterministic: bool) -> int:
    """Elements of the scratch tensor of a backward."""
    batch, heads, q_len, head_dim = query.shape
    rows = batch * heads * cdiv(q_len, _ROWS) * _ROWS
    return rows * (2 + tile_columns(max(head_dim, value.shape[3]))) + (rows // 64 if deterministic else 0)


def prepare(problem: Problem) -> tuple[Scratch, Launch]:
    """Scratch tensors, and the launch that fills them."""
    batch, heads, q_len, _ = problem.query.shape
    q_rows, rows = problem.q_rows, batch * heads * problem.q_rows
    dim, v_dim = tile_columns(max(problem.query.shape[3], problem.value.shape[3])), problem.value.shape[3]
    size = scratch_size(problem.query, problem.value, problem.deterministic)
    whole = problem.lse.new_empty(size) if problem.scratch is None else problem.scratch[:size]
    lse2, delta, acc, rest = whole.split((rows, rows, rows * dim, size - rows * (2 + dim)))
    turns = rest.view(torch.int32) if problem.deterministic else None
    scratch = Scratch(lse2.view(-1, q_rows), delta.view(-1, q_rows), acc.view(-1, 256), turns)
    out, grad_out, lse, grad_lse = problem.out, problem.grad_out, problem.lse, problem.grad_lse
    args = (
        out, grad_out, lse, grad_lse, scratch.lse, scratch.delta, scratch.grad_query, turns,
        *out.stride()[:3], *grad_out.stride()[:3], lse.stride(1), 0 if grad_lse is None else grad_lse.stride(1),
        heads, q_len, q_rows,
    )  # fmt: skip
    constants = {
        "HEAD_DIM": v_dim, "BLOCK_D": 1 << (v_dim - 1).bit_length(), "DIM": dim, "BLOCK_M": 64,
        "GRAD_LSE": grad_lse is not None, "DETERMINISTIC": problem.deterministic, "ALIGN": _align(out, grad_out),
        "num_warps": 4,
    }  # fmt: skip
    return scratch, Launch(prepare_kernel, constants, (q_rows // 64 * batch * heads,), args)


def _align(*tensors: Tensor) -> int:
    combined = 0
    for x in tensors:
        batch, head, row, _ = x.stride()
        combined |= batch | head | row
    return 1 if combined & 7 else 8


def finish(problem: Problem, scratch: Scratch) -> Launch:
    """The launch that writes grad_query."""
    batch, heads, q_len, head_dim = problem.query.shape
    grad = problem.grad_query
    args = (scratch.grad_query, grad, *grad.stride()[:3], heads, q_len, problem.q_rows, problem.scale)
    dim = tile_columns(max(head_dim, problem.value.shape[3]))
    constants = {"HEAD_DIM": head_dim, "DIM": dim, "ALIGN": _align(grad), "num_warps": 4}
    return Launch(finish_kernel, constants, (cdiv(q_len, 64) * batch * heads,), args)


def numbers(problem: Problem, at_once: int, blocks_n: int) -> tuple[int | float, ...]:
    """The arguments of a main kernel behind its tensors."""
    batch, heads, q_len, _ = problem.query.shape
    kv_heads, kv_len = problem.key.shape[1:3]
    scale, softcap, mask = problem.scale, problem.softcap, problem.mask
    return (
        heads, kv_heads, heads // kv_heads, batch * kv_heads, at_once, blocks_n, q_len, problem.q_rows, kv_len,
        mask.lower or 0, mask.upper or 0, scale / softcap if softcap else scale * LOG2E, scale,
        (softcap or 0.0) * LOG2E,
    )  # fmt: skip


def heads_at_once(batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int, even: bool) -> int:
    """How many key heads are worked on together.

    Their query, grad_out and dQ stay in L2, but where key blocks differ in length (not ``even``) a last group of fewer
    than two waves of CTAs leaves SMs idle for up to an eighth of the run: then L2 has to stand back.  By less where
    query heads share a key head, whose CTAs read as much more (32/8 heads causal at 4k: 525 TFLOP/s instead of 490).
    """
    total = batch * kv_heads
    waves = _WAVES if heads == kv_heads else _WAVES // 2
    at_once = _L2_BYTES // max(1, heads // kv_heads * q_len * dim * 8)
    if not even:
        at_once = max(at_once, cdiv(waves, cdiv(kv_len, 128)))
    groups = cdiv(total, max(1, min(total, at_once)))
    return cdiv(total, groups)  # groups of about the same size
