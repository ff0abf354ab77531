"""Looks through views, repeats, scales and casts of query, key and value, so that the op gets what lies under them.

Keeping an operand as it is would always be right.  Looking through it saves a materialised repeat of K and V (GQA),
a transposed view that a second transpose would undo, or a separate scaling of Q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from .canonical import Arg, Call, number, tensor
from .products import Label, Labels, Operand
from .program import Program, constant, same_shape, same_size


@dataclass(frozen=True)
class Peeled:
    """``operand == scale * (node, cast and repeated)``: a node under an operand, and what was looked through."""

    node: fx.Node
    labels: Labels
    scale: float = 1.0
    repeat: int = 1  # each head of ``node`` stands for this many, next to each other
    upcast_from: torch.dtype | None = None
    dropped: frozenset[Label] = frozenset()  # labels it was expanded over
    computed: int = 0  # how many scales and casts were looked through: work that goes away
    path: tuple[fx.Node, ...] = ()  # the nodes looked through, outermost first

    def under(self, c: Call, source: fx.Node, labels: Labels | None = None, **changes: object) -> Peeled:
        path = (*self.path, c.node)
        return replace(self, node=source, labels=self.labels if labels is None else labels, path=path, **changes)  # type: ignore[arg-type]


def peel(program: Program, operand: Operand, at: fx.Node, head: Label | None) -> Iterator[Peeled]:
    """The operand itself, then what lies deeper and deeper under it.  ``head``: the label of the repeated head dim."""
    state = Peeled(operand.node, operand.labels)
    where = at
    while True:
        yield state
        c = program.value(state.node, where)
        if c is None or c.inplace or tensor(c.node) is None:
            return  # under an in-place operation lies what the operand no longer holds
        deeper = _repeat(program, c, state, head) or _PEELERS.get(c.op, _nothing)(program, c, state)
        if deeper is None or tensor(deeper.node) is None:
            return
        where, state = deeper.path[-1], deeper


def _nothing(program: Program, c: Call, state: Peeled) -> Peeled | None:
    return None


def _dims(c: Call, *names: str) -> list[int] | None:
    values = [number(c.get(name)) for name in names]
    return None if any(not isinstance(v, int) for v in values) else [int(v) for v in values]  # type: ignore[arg-type]


def _reorder(c: Call, state: Peeled, order: list[int]) -> Peeled | None:
    """``result.dim(i) == source.dim(order[i])``."""
    rank = len(state.labels)
    order = [d % rank for d in order] if rank else order
    if sorted(order) != list(range(rank)):
        return None
    labels = tuple(state.labels[order.index(d)] for d in range(rank))
    return state.under(c, c["input"], labels)


def _transpose(program: Program, c: Call, state: Peeled) -> Peeled | None:
    dims = _dims(c, "dim0", "dim1")
    if dims is None:
        return None
    order = list(range(len(state.labels)))
    a, b = dims
    order[a], order[b] = order[b], order[a]
    return _reorder(c, state, order)


def _mt(program: Program, c: Call, state: Peeled) -> Peeled | None:
    rank = len(state.labels)
    name = c.get("name")
    swaps = c.op in ("t", "mT") or name in ("mT", "mH") or ((name in ("T", "H") or c.op == "numpy_T") and rank == 2)
    if not swaps:
        return None
    if rank < 2 or tensor(c.node) is None or tensor(c.node).is_complex():  # type: ignore[union-attr]
        return None
    order = list(range(rank))
    order[-1], order[-2] = order[-2], order[-1]
    return _reorder(c, state, order)


def _permute(program: Program, c: Call, state: Peeled) -> Peeled | None:
    dims = c.get("dims", ())
    return _reorder(c, state, list(dims)) if all(isinstance(d, int) for d in dims) else None


def _unsqueeze(program: Program, c: Call, state: Peeled) -> Peeled | None:
    dims = _dims(c, "dim")
    if dims is None:
        return None
    position = dims[0] % len(state.labels)
    return _without(c, state, [position])


def _getitem(program: Program, c: Call, state: Peeled) -> Peeled | None:
    added = new_axes(c)
    return None if added is None else _without(c, state, added)


def new_axes(c: Call) -> list[int] | None:
    """The dims that ``x[:, None]`` adds, if it does nothing else."""
    index = c.get("index")
    index = index if isinstance(index, tuple) else (index,)
    result = tensor(c.node)
    plain = all(i is None or i is Ellipsis or (isinstance(i, slice) and i == slice(None)) for i in index)
    if c.op != "getitem" or result is None or not plain:
        return None
    if Ellipsis in index:
        split = index.index(Ellipsis)
        front = [d for d, i in enumerate(index[:split]) if i is None]
        tail = index[split + 1 :]
        back = [result.dim() - len(tail) + d for d, i in enumerate(tail) if i is None]
        return front + back
    return [d for d, i in enumerate(index) if i is None]


def _without(c: Call, state: Peeled, positions: list[int]) -> Peeled | None:
    gone = {state.labels[p] for p in positions}
    if state.labels[-1] in gone and state.labels[-1] is not None:
        return None
    labels = tuple(x for p, x in enumerate(state.labels) if p not in positions)
    # a dim of size 1 that has a label: the label's size is 1, so dropping it is an expansion by 1
    return state.under(c, c["input"], labels, dropped=state.dropped | {x for x in gone if x is not None})


def _expand(program: Program, c: Call, state: Peeled) -> Peeled | None:
    source, result = tensor(c["input"]), tensor(c.node)
    if source is None or result is None or source.dim() > result.dim():
        return None
    offset = result.dim() - source.dim()
    expanded = {
        d for d in range(result.dim()) if d < offset or not same_size(source.shape[d - offset], result.shape[d])
    }
    gone = {state.labels[d] for d in expanded if state.labels[d] is not None}
    labels = tuple(None if d in expanded else x for d, x in enumerate(state.labels))[offset:]
    return state.under(c, c["input"], labels, dropped=state.dropped | gone)


def _copy(program: Program, c: Call, state: Peeled) -> Peeled | None:
    return state.under(c, c["input"]) if set(c.args) <= {"input", "memory_format"} else None


def _scale(program: Program, c: Call, state: Peeled) -> Peeled | None:
    if set(c.args) != {"input", "other"}:
        return None
    a, b = c["input"], c["other"]
    factor = constant(program, b, c.node)
    if factor is None and c.op == "mul":
        a, b, factor = b, a, constant(program, a, c.node)
    if factor is None or not (factor > 0 and math.isfinite(factor)):
        return None
    source, result = tensor(a), tensor(c.node)
    if source is None or not same_shape(source, result) or source.dtype is not result.dtype:  # type: ignore[union-attr]
        return None
    scale = state.scale * (factor if c.op == "mul" else 1 / factor)
    return state.under(c, a, scale=scale, computed=state.computed + 1)


def _upcast(program: Program, c: Call, state: Peeled) -> Peeled | None:
    source, result = tensor(c["input"]), tensor(c.node)
    if source is None or result is None or source.device != result.device:
        return None
    if source.dtype is result.dtype:
        return state.under(c, c["input"])
    exact = source.dtype in (torch.bfloat16, torch.float16) and result.dtype is torch.float32
    if not exact or state.upcast_from is not None:
        return None
    return state.under(c, c["input"], upcast_from=source.dtype, computed=state.computed + 1)


_PEELERS: dict[str, Callable[[Program, Call, Peeled], Peeled | None]] = {
    "transpose": _transpose,
    "permute": _permute,
    "t": _mt,
    "mT": _mt,
    "numpy_T": _mt,
    "getattr": _mt,
    "unsqueeze": _unsqueeze,
    "getitem": _getitem,
    "expand": _expand,
    "expand_as": _expand,
    "broadcast_to": _expand,
    "contiguous": _copy,
    "clone": _copy,
    "mul": _scale,
    "div": _scale,
    "cast": _upcast,
}


def _repeat(program: Program, c: Call, state: Peeled, head: Label | None) -> Peeled | None:
    """Under a repeat of each head ``n`` times in place (``repeat_interleave``; ``repeat`` orders heads otherwise)."""
    if head is None or head not in state.labels or state.repeat != 1:
        return None
    dim = state.labels.index(head)
    found = _repeat_interleave(c, dim) or _expanded_and_flattened(program, c, dim)
    if found is None:
        return None
    source, path = found
    before, after = tensor(source), tensor(c.node)
    if before is None or after is None or before.dim() != after.dim():
        return None
    few, many = before.shape[dim], after.shape[dim]
    if not (isinstance(few, int) and isinstance(many, int) and few > 0 and many % few == 0):
        return None
    if not all(same_size(a, b) for d, (a, b) in enumerate(zip(before.shape, after.shape, strict=True)) if d != dim):
        return None
    return replace(state.under(c, source, repeat=many // few), path=(*state.path, *path))


def _repeat_interleave(c: Call, dim: int) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    if c.op != "repeat_interleave" or not isinstance(number(c.get("repeats")), int):
        return None
    result, along = tensor(c.node), c.get("dim")
    if result is None or not isinstance(along, int) or along % result.dim() != dim:
        return None
    return c["input"], (c.node,)


def _expanded_and_flattened(program: Program, c: Call, dim: int) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """``x[:, :, None].expand(b, h, n, s, d).reshape(b, h * n, s, d)`` in any spelling, head dim anywhere."""
    if c.op not in ("reshape", "view", "flatten"):
        return None
    result, path = tensor(c.node), [c.node]
    inner = program.value(c["input"], c.node)
    while inner is not None and inner.op in ("contiguous", "clone"):
        path.append(inner.node)
        inner = program.value(inner["input"], inner.node)
    if inner is None or inner.op not in ("expand", "expand_as", "broadcast_to", "repeat"):
        return None
    wide, narrow = tensor(inner.node), tensor(inner["input"])
    if result is None or wide is None or narrow is None or wide.dim() != result.dim() + 1 or narrow.dim() != wide.dim():
        return None
    at = dim + 1
    merged = [*wide.shape[:dim], wide.shape[dim] * wide.shape[at], *wide.shape[at + 1 :]]
    only_there = all(same_size(a, b) for d, (a, b) in enumerate(zip(narrow.shape, wide.shape, strict=True)) if d != at)
    flattened = all(same_size(a, b) for a, b in zip(merged, result.shape, strict=True))
    if not (only_there and flattened and same_size(narrow.shape[at], 1)):
        return None
    path.append(inner.node)
    opened = program.value(inner["input"], inner.node)
    if opened is None:
        return None
    axes = new_axes(opened) if opened.op == "getitem" else _dims(opened, "dim") if opened.op == "unsqueeze" else None
    if axes is None or [a % narrow.dim() for a in axes] != [at]:
        return None
    path.append(opened.node)
    source: Arg = opened["input"]
    return (source, tuple(path)) if isinstance(source, fx.Node) else None
