"""Writes the op into the graph: views of the inputs, the op, views of its output, all with fake values."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch import fx

from ..ops.layout import memory_order
from ..ops.library import attn
from ..spec import AttentionSpec
from . import canonical
from .canonical import tensor
from .emit_operands import arguments, with_temperatures
from .emitter import Emitter
from .operands import NO_OPERANDS, Operands, Table
from .plan import Input, Plan
from .products import Label
from .program import Refused, same_shape, same_strides
from .temperature import Temperature

aten = torch.ops.aten


def _operand(e: Emitter, plan: Plan, source: Input) -> fx.Node:
    """The [batch, heads, length, head dim] view of an input."""
    node, labels = source.node, list(source.labels)
    for dim in reversed([d for d, x in enumerate(labels) if x is None]):
        node = e.call(aten.squeeze.dim, node, dim)
        del labels[dim]
    missing = [x for x in source.order if x not in labels]
    for label in missing:
        node = e.call(aten.unsqueeze.default, node, 0)
        labels.insert(0, label)
    permutation = [labels.index(x) for x in source.order]
    if permutation != list(range(len(labels))):
        node = e.call(aten.permute.default, node, permutation)
    if missing:
        sizes = [e.size(plan.sizes(x)[0], x) if x in missing else -1 for x in source.order]
        node = e.call(aten.expand.default, node, sizes)
    batch, heads = len(source.batch), len(source.heads)
    if heads > 1:
        node = e.call(aten.flatten.using_ints, node, batch, batch + heads - 1)
    if batch > 1:
        node = e.call(aten.flatten.using_ints, node, 0, batch - 1)
    if batch == 0:
        node = e.call(aten.unsqueeze.default, node, 0)
    if heads == 0:
        node = e.call(aten.unsqueeze.default, node, 1)
    return node


def _mean_where_blind(e: Emitter, out: fx.Node, lse: fx.Node, value: fx.Node) -> fx.Node:
    """What softmax over equal scores gives: the scores of a row are all the same large number if none is left."""
    heads, kv_heads = tensor(out).shape[1], tensor(value).shape[1]  # type: ignore[union-attr] # the op was just emitted
    mean = e.call(aten.mean.dim, value, [2], True)
    if heads != kv_heads:
        mean = e.call(aten.repeat_interleave.self_int, mean, heads // kv_heads, 1)
    blind = e.call(aten.unsqueeze.default, e.call(aten.eq.Scalar, lse, -math.inf), 3)
    return e.call(aten.where.self, blind, e.call(aten.to.dtype, mean, tensor(out).dtype), out)  # type: ignore[union-attr]


def _result(e: Emitter, plan: Plan, node: fx.Node) -> fx.Node:
    """The op's output in the dims of the site's result."""
    labels: list[Label] = []
    for labels_here, dim in ((plan.out_heads, 1), (plan.out_batch, 0)):
        if len(labels_here) > 1:
            sizes = [e.size(plan.sizes(x)[0], x) for x in labels_here]
            node = e.call(aten.unflatten.int, node, dim, sizes)
        elif not labels_here:
            node = e.call(aten.squeeze.dim, node, dim)
    labels = [*plan.out_batch, *plan.out_heads, plan.query.length, plan.value.feature]
    permutation = [labels.index(x) for x in plan.out]
    if permutation != list(range(len(labels))):
        node = e.call(aten.permute.default, node, permutation)
    return node


def replacement(
    site: fx.Node,
    plan: Plan,
    spec: AttentionSpec,
    *,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    keep_strides: bool,
    private: bool,
    operands: Operands = NO_OPERANDS,
    table: Table | None = None,
    blind_mean: bool = False,
    temperatures: Sequence[Temperature] = (),
) -> tuple[Emitter, fx.Node]:
    """Emit what computes ``site`` by the op.  Raises Refused, having emitted nothing, if that fails.

    Args:
        dtype: the op's dtype; inputs of others are cast to it, unless ``autocast`` (its dtype) does so.
        keep_strides: give the result the strides that ``site`` has.
        private: the result will be written to, so it must not be the tensor that the op saves for its backward.
        operands, table: what the site has besides query, key and value, and the scores' dims that it refers to.
        blind_mean: a row that sees nothing is the mean of all values, where the op gives 0.
        temperatures: what the query is multiplied by first.
    """
    e = Emitter(site, plan.query.node)
    try:
        tensors = [_operand(e, plan, source) for source in plan.inputs]
        if temperatures and table is not None:
            tensors[0] = with_temperatures(e, plan, table, temperatures, tensors[0])
        if autocast is None:
            tensors = [
                x if tensor(x).dtype is dtype else e.call(aten.to.dtype, x, dtype)  # type: ignore[union-attr]
                for x in tensors
            ]
        old = tensor(site)
        assert old is not None  # checked when the site was found
        kwargs = {name: e.symbol(arg) for name, arg in spec.op_kwargs().items()}
        kwargs.update(arguments(e, plan, table, operands))
        both = e.call(attn, *tensors, autocast=None if autocast is None else (old.device.type, autocast), **kwargs)
        out = e.call(operator.getitem, both, 0)
        if blind_mean:
            out = _mean_where_blind(e, out, e.call(operator.getitem, both, 1), tensors[2])
        node = _result(e, plan, out)
        new = tensor(node)
        if not same_shape(new, old):
            raise Refused(
                "the shape of the result could not be kept; "
                "compile with dynamic=False, or split the heads with static sizes"
            )
        if new.dtype is not old.dtype:  # type: ignore[union-attr]
            node = e.call(aten.to.dtype, node, old.dtype)
        elif private:
            node = e.call(aten.clone.default, node)
        if keep_strides and not same_strides(tensor(node), old):
            node = _with_strides(e, node, old)
        return e, node
    except (TypeError, ValueError, NotImplementedError) as error:
        e.undo()
        raise Refused(
            f"the op does not take these inputs ({error}); give it what the message expects, or report this"
        ) from error
    except Exception:
        e.undo()
        raise


def _with_strides(e: Emitter, node: fx.Node, like: torch.Tensor) -> fx.Node:
    """A copy with the strides of ``like``, which is dense: some order of the dims is contiguous."""
    order = memory_order(like.stride(), like.shape)
    if order != list(range(len(order))):
        back = [order.index(dim) for dim in range(len(order))]
        node = e.call(aten.permute.default, node, order)
        node = e.call(aten.permute.default, e.call(aten.contiguous.default, node), back)
    else:
        node = e.call(aten.contiguous.default, node)
    if not same_strides(tensor(node), like):
        raise Refused("the strides of the result matter here and could not be kept; call .contiguous() on it")
    return node


def prune(nodes: list[fx.Node], matched: set[fx.Node]) -> None:
    """Erase the replaced nodes and what only they needed, but nothing that could have an effect of its own."""
    pending, erased = list(nodes), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node in erased or node.users or node.op not in ("call_function", "call_method"):
            continue
        if node not in matched and not _is_pure(node):
            continue
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        erased.add(node)
        pending.extend(inputs)


def _is_pure(node: fx.Node) -> bool:
    c = canonical.call(node)
    return c is not None and not c.inplace and c.op not in ("dropout", "setitem") and "out" not in c.args
