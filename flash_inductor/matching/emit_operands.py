"""How the op gets the tensors of a site besides query, key and value.

The op takes a bias and a mask with four dims, each 1 or full, so nothing is expanded that the graph doesn't hold
expanded: key padding stays [batch, 1, 1, keys].
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..ops.library import block_ranges
from .canonical import tensor
from .emitter import Emitter
from .mask_domain import axis, known
from .operands import Operands, Part, Table
from .plan import Plan
from .products import Label
from .program import Refused, same_size
from .temperature import Temperature

aten = torch.ops.aten
BLOCK_RANGES = block_ranges


def arguments(e: Emitter, plan: Plan, table: Table | None, given: Operands) -> dict[str, Any]:
    """Emit the views and give the op's keyword arguments for them; {} without any operand."""
    if not given:
        return {}
    found: dict[str, Any] = {}
    if given.bias:
        biases = [_bias(e, plan, _pairs(e, plan, table, part), part.factor, len(given.bias)) for part in given.bias]
        found["bias"] = _folded(e, aten.add.Tensor, biases)
    if given.mask:
        found["mask"] = _folded(e, aten.bitwise_and.Tensor, [_pairs(e, plan, table, part) for part in given.mask])
    if given.query_segments is not None and given.key_segments is not None:
        found["query_segments"] = _ids(e, _pairs(e, plan, table, given.query_segments), 3)
        found["key_segments"] = _ids(e, _pairs(e, plan, table, given.key_segments), 2)
    if given.sinks is not None:
        heads, size = tensor(given.sinks), plan.shape(plan.query)[1]
        if heads is None or heads.dim() != 1 or not same_size(heads.shape[0], size):
            raise Refused("the attention sinks are not one number for each head; make them of shape [heads]")
        found["sinks"] = given.sinks
    if given.dropout_p:
        device = tensor(plan.query.node).device  # type: ignore[union-attr] # it was checked
        # drawn in the graph, so that seeds, checkpointing and functionalisation follow torch's rules
        found["rng_state"] = e.call(torch.randint, 0, 2**62, (2,), dtype=torch.int64, device=device)
        found["dropout_p"] = given.dropout_p
    found.update(_ranges(e, plan, found))
    return found


def _ranges(e: Emitter, plan: Plan, found: dict[str, Any]) -> dict[str, Any]:
    """Which blocks of keys the blocks of queries see: the CUDA kernels skip the others."""
    query = tensor(plan.query.node)
    mask = tensor(found.get("mask"))
    padding = mask is not None and all(isinstance(s, int) and s == 1 for s in mask.shape[1:3])
    if query is None or query.device.type != "cuda" or not (padding or "query_segments" in found):
        return {}
    lengths = [e.size(x, x.length) for x in (plan.query, plan.key)]
    segments = [found.get(name) for name in ("query_segments", "key_segments")]
    both = e.call(BLOCK_RANGES, found["mask"] if padding else None, *segments, *lengths)
    return {name: e.call(operator.getitem, both, i) for i, name in enumerate(("key_range", "query_range"))}


def _folded(e: Emitter, target: Any, nodes: list[fx.Node]) -> fx.Node:
    total = nodes[0]
    for node in nodes[1:]:
        total = e.call(target, total, node)
    return total


def _bias(e: Emitter, plan: Plan, node: fx.Node, factor: float, parts: int) -> fx.Node:
    """One part of the bias, scaled.  What is computed here is computed as precisely as the scores it was added to."""
    query, part = tensor(plan.query.node), tensor(node)
    assert query is not None and part is not None  # one was checked, the other emitted with its value
    dtype = part.dtype
    if not dtype.is_floating_point:
        dtype = torch.promote_types(query.dtype, torch.float32)
    elif factor != 1.0 or parts > 1:
        dtype = torch.promote_types(query.dtype, dtype)
    if dtype is not part.dtype:
        node = e.call(aten.to.dtype, node, dtype)
    return node if factor == 1.0 else e.call(aten.mul.Tensor, node, factor)


def _ids(e: Emitter, node: fx.Node, dim: int) -> fx.Node:
    """Segment ids [batch, length] of [batch, 1, length, 1] or, with ``dim`` 2, [batch, 1, 1, length]."""
    node = e.call(aten.squeeze.dim, e.call(aten.squeeze.dim, node, dim), 1)
    value = tensor(node)
    return node if value is None or value.dtype is torch.int32 else e.call(aten.to.dtype, node, torch.int32)


def _pairs(e: Emitter, plan: Plan, table: Table | None, part: Part) -> fx.Node:
    """A part as [batch, heads, queries, keys] of the op, each dim 1 or full."""
    value, query = tensor(part.node), tensor(plan.query.node)
    if table is None or value is None or query is None:
        raise Refused("the mask's place in the scores isn't known; give the mask as many dims as the scores have")
    if value.device != query.device:
        raise Refused(f"`{part.node.name}` is on {value.device} and the query on {query.device}; move it there")
    reason = part.obstacle()
    if reason is not None:
        raise Refused(reason)
    node = e.call(aten.bitwise_not.default, part.node) if part.negated else part.node
    return _merged(e, plan, table, _regrouped(e, table, part, _aligned(e, part, node)))


def _aligned(e: Emitter, part: Part, node: fx.Node) -> fx.Node:
    """The part broadcastable to its table: a dim for each of the table's, of its size or 1."""
    sizes: tuple[Any, ...] = tensor(node).shape  # type: ignore[union-attr] # it was checked
    rank, missing = len(part.table), len(part.table) - len(sizes)
    unit = [isinstance(s, int) and s == 1 and linear.is_constant for s, linear in zip(sizes, part.index, strict=True)]
    in_place = missing >= 0 and all(
        one or (linear == axis(missing + d, rank) and same_size(size, part.table[missing + d]))
        for d, (one, linear, size) in enumerate(zip(unit, part.index, sizes, strict=True))
    )
    if in_place:
        for _ in range(missing):
            node = e.call(aten.unsqueeze.default, node, 0)
        return node
    dims: list[int] = []
    for d in reversed(range(len(sizes))):
        linear, size = part.index[d], sizes[d]
        if linear.is_constant:
            node = e.call(aten.squeeze.dim, node, d) if unit[d] else e.call(aten.select.int, node, d, linear.const)
            continue
        (t,) = (t for t, coef in enumerate(linear.coefs) if coef)
        if linear.const != 0 or not same_size(size, part.table[t]):
            node = e.call(aten.narrow.default, node, d, linear.const, e.symbol(part.table[t]))
        dims.insert(0, t)
    order = sorted(range(len(dims)), key=dims.__getitem__)
    if order != list(range(len(dims))):
        node = e.call(aten.permute.default, node, order)
    for t in range(rank):
        if t not in dims:
            node = e.call(aten.unsqueeze.default, node, t)
    return node


def _regrouped(e: Emitter, table: Table, part: Part, node: fx.Node) -> fx.Node:
    """Leading dims as the score product has them, where the scores were reshaped before the part comes in."""
    ours, theirs = part.table[:-2], table.sizes[:-2]
    if len(ours) == len(theirs) and all(same_size(a, b) for a, b in zip(ours, theirs, strict=True)):
        return node
    rank = len(part.table)
    if not any(d < rank - 2 for d in part.dims):
        for _ in range(rank - 2):
            node = e.call(aten.squeeze.dim, node, 0)
        for _ in theirs:
            node = e.call(aten.unsqueeze.default, node, 0)
        return node
    have: tuple[Any, ...] = tensor(node).shape  # type: ignore[union-attr] # emitted with its value
    expanded: list[Any] = []
    shape: list[Any] = []
    narrow = False
    for before, after in _groups(ours, theirs):
        varies = any(d in part.dims for d in before)
        narrow |= varies and not all(same_size(have[d], ours[d]) for d in before)
        expanded += [e.symbol(ours[d]) if varies else 1 for d in before]
        shape += [e.symbol(theirs[d]) if varies else 1 for d in after]
    if narrow:
        node = e.call(aten.expand.default, node, [*expanded, -1, -1])
    return e.call(aten.reshape.default, node, [*shape, *(e.symbol(s) for s in have[-2:])])


def _groups(ours: Sequence[Any], theirs: Sequence[Any]) -> list[tuple[range, range]]:
    """Runs of dims that a reshape of ``ours`` to ``theirs`` keeps to themselves; all in one where that isn't known."""
    cuts = [(0, 0)]
    a = b = 0
    x: Any = 1
    y: Any = 1
    while a < len(ours) or b < len(theirs):
        if a < len(ours) and (b == len(theirs) or not known(x > y)):
            x, a = x * ours[a], a + 1
        else:
            y, b = y * theirs[b], b + 1
        if a and b and same_size(x, y):
            cuts.append((a, b))
            x = y = 1
    cuts = [c for c in cuts if c != (len(ours), len(theirs))] + [(len(ours), len(theirs))]
    return [(range(p[0], n[0]), range(p[1], n[1])) for p, n in itertools.pairwise(cuts)]


def _merged(e: Emitter, plan: Plan, table: Table, node: fx.Node) -> fx.Node:
    """Leading labels to one batch and one head dim."""
    sizes: tuple[Any, ...] = tensor(node).shape  # type: ignore[union-attr] # emitted with its value
    labels = list(table.labels[:-2])
    for d in reversed(range(len(labels))):
        if isinstance(sizes[d], int) and sizes[d] == 1:
            node = e.call(aten.squeeze.dim, node, d)
            del labels[d]
    batch, heads = ([x for x in group if x in labels] for group in (plan.query.batch, plan.query.heads))
    order = [labels.index(x) for x in (*batch, *heads)]
    if len(order) != len(labels):
        raise Refused("the mask has a dim that is neither batch nor heads; leave that dim out")
    if order != list(range(len(order))):
        node = e.call(aten.permute.default, node, [*order, len(order), len(order) + 1])
    node = _one_dim(e, plan, node, len(batch), heads, plan.query.heads)
    return _one_dim(e, plan, node, 0, batch, plan.query.batch)


def _one_dim(
    e: Emitter, plan: Plan, node: fx.Node, start: int, present: Sequence[Label], group: Sequence[Label]
) -> fx.Node:
    """The dims from ``start`` on with the labels ``present``, a part of ``group``, as one: 1, or all of it."""
    if not present:
        return e.call(aten.unsqueeze.default, node, start)
    if len(present) < len(group):
        rank = tensor(node).dim()  # type: ignore[union-attr] # emitted with its value
        sizes: list[Any] = [-1] * (rank + len(group) - len(present))
        for offset, label in enumerate(group):
            if label not in present:
                node = e.call(aten.unsqueeze.default, node, start + offset)
                sizes[start + offset] = e.size(plan.sizes(label)[0], label)
        node = e.call(aten.expand.default, node, sizes)
    if len(group) == 1:
        return node
    return e.call(aten.flatten.using_ints, node, start, start + len(group) - 1)


def with_temperatures(e: Emitter, plan: Plan, table: Table, given: Sequence[Temperature], query: fx.Node) -> fx.Node:
    """The query [batch, heads, queries, head dim] with the temperatures on it, in the dtype that torch promotes to."""
    for temperature in given:
        target = aten.div.Tensor if temperature.divided else aten.mul.Tensor
        query = e.call(target, query, _pairs(e, plan, table, temperature.part))
    return query
