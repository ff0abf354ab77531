"""Attention sinks: a logit for each head that takes part in the softmax and has no value (gpt-oss).

They are written as one more column of the scores, which is cut off after the softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .canonical import Call, tensor
from .products import Label
from .program import Program, Refused, same_size

_EXPANSIONS = frozenset({"expand", "expand_as", "broadcast_to", "contiguous", "clone", "cast"})
_VIEWS = _EXPANSIONS | {"reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze", "getitem"}


@dataclass(frozen=True)
class Column:
    """``scores`` and, as their last or first column, ``sinks`` [..., queries, 1]."""

    scores: fx.Node
    sinks: fx.Node
    first: bool


def column(c: Call) -> Column:
    """What a ``cat`` puts next to the scores.  Raises Refused if it isn't one column."""
    parts, result = c.get("tensors"), tensor(c.node)
    dim = c.get("dim", 0)
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or result is None:
        raise Refused(
            "the scores are put together from other than two parts; "
            "put the scores and one column of sinks together, in one cat"
        )
    values = [tensor(x) for x in parts]
    if dim not in (-1, result.dim() - 1) or any(v is None or v.dim() != result.dim() for v in values):
        raise Refused(
            "something is put next to the scores along another dim than that of the keys; "
            "put sinks there along the last dim"
        )
    narrow = [v is not None and same_size(v.shape[-1], 1) for v in values]
    if narrow.count(True) != 1:
        raise Refused(
            "the scores get more columns than one for an attention sink; "
            "use one column of sinks, or keys and values for more"
        )
    first = narrow[0]
    return Column(parts[1] if first else parts[0], parts[0] if first else parts[1], first)


def cuts_off(c: Call, sink: Any) -> bool:
    """Whether a slice takes just the column of the sink off."""
    source, result = tensor(c["input"]), tensor(c.node)
    if source is None or result is None or source.dim() != result.dim():
        return False
    if not all(same_size(a, b) for a, b in zip(source.shape[:-1], result.shape[:-1], strict=True)):
        return False
    if not same_size(result.shape[-1], source.shape[-1] - 1):
        return False
    start, step = _start(c, source.dim())
    return step in (None, 1) and (start == 1 if sink.first else start in (None, 0))


def _start(c: Call, rank: int) -> tuple[Any, Any]:
    """Start and step of a slice over the last dim; a step of 0 for what isn't one."""
    if c.op == "getitem":
        index = c.get("index")
        index = index if isinstance(index, tuple) else (index,)
        others = [i for i in index[:-1] if i is not Ellipsis]
        reaches_last = Ellipsis in index[:-1] or len(index) == rank
        whole = all(isinstance(i, slice) and i == slice(None) for i in others)
        last = index[-1]
        return (last.start, last.step) if reaches_last and whole and isinstance(last, slice) else (None, 0)
    if c.get("dim", 0) not in (-1, rank - 1):
        return None, 0
    return c.get("start"), c.get("step")


def vector(program: Program, sink: Any, lead: tuple[Label, ...], query_heads: tuple[Label, ...]) -> fx.Node:
    """The [heads] tensor that a sink's column [..., queries, 1] is an expansion of.  Raises Refused.

    ``lead``: the labels of the scores' leading dims; ``query_heads``: those that are the op's heads, in their order.
    """
    column = tensor(sink.node)
    if column is None or column.dim() != len(lead) + 2:
        raise Refused(
            "the attention sinks have other dims than the scores; reshape them to [1, heads, 1, 1] and expand that"
        )
    head_dims = [d for d, label in enumerate(lead) if label in query_heads]
    count = math.prod(column.shape[d] for d in head_dims)
    if tuple(lead[d] for d in head_dims) != query_heads or not isinstance(count, int):
        raise Refused(
            "the heads of the attention sinks aren't the op's; "
            "give each query head one number, in the order of the query heads"
        )
    # under the expansion over everything else than heads, one number for each head
    c = _down(program, sink.node, sink.at, _EXPANSIONS, lambda value: same_size(value.numel(), count))
    value = tensor(c[0])
    assert value is not None  # _down looked at it
    offset = column.dim() - value.dim()
    varies = [d + offset for d, size in enumerate(value.shape) if not same_size(size, 1)]
    if varies != [d for d in head_dims if not same_size(column.shape[d], 1)]:
        raise Refused(
            "the attention sinks differ between queries or batch entries, or heads share them; "
            "give each head one number, as a parameter of shape [heads]"
        )
    # views of as many elements keep them in order
    node, at = _down(program, *c, _VIEWS, lambda value: value.dim() == 1 and same_size(value.numel(), count))
    if program.writes_between(node, program.position[at], len(program.nodes)):
        raise Refused(f"the attention sinks `{node.name}` are written to in place; write to a copy of them")
    return node


def _down(
    program: Program, node: fx.Node, at: fx.Node, through: frozenset[str], stop: Callable[[torch.Tensor], bool]
) -> tuple[fx.Node, fx.Node]:
    """The first node below that satisfies ``stop``, and where it is read."""
    while True:
        value = tensor(node)
        if value is not None and stop(value):
            return node, at
        c = program.value(node, at)
        source = None if c is None else tensor(c.get("input"))
        same_numbers = through is _EXPANSIONS or (
            source is not None and value is not None and same_size(source.numel(), value.numel())
        )
        if c is None or c.inplace or c.op not in through or source is None or not same_numbers:
            raise Refused(
                f"the attention sinks come from `{node.name}`, which isn't one number for each head; "
                "give each head one number, as a parameter of shape [heads]"
            )
        if source.device != value.device:  # type: ignore[union-attr] # it has a source, so a value
            raise Refused("the attention sinks are on another device; move them to the query's device")
        node, at = c["input"], c.node
