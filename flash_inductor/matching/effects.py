"""Which tensors a node of a graph that isn't functional writes to, and which may share its memory."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from . import canonical
from .mask_domain import same

_VIEWS = frozenset(
    [
        "transpose",
        "permute",
        "t",
        "movedim",
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "expand",
        "expand_as",
        "view_as",
        "broadcast_to",
        "unsqueeze",
        "squeeze",
        "getitem",
        "select",
        "slice",
        "narrow",
        "chunk",
        "split",
        "unbind",
        "contiguous",
        "detach",
        "cast",
    ]
)
_INPLACE_NAMES = [
    "iadd",
    "isub",
    "imul",
    "imatmul",
    "itruediv",
    "ifloordiv",
    "imod",
    "ipow",
    "iand",
    "ior",
    "ixor",
    "ilshift",
    "irshift",
]
_INPLACE_OPERATORS = frozenset(getattr(operator, name) for name in _INPLACE_NAMES) | {operator.setitem}
_INPLACE_METHODS = frozenset(f"__{name}__" for name in _INPLACE_NAMES)


def order(graph: fx.Graph) -> dict[fx.Node, int]:
    """The position of each node in program order."""
    return {node: position for position, node in enumerate(graph.nodes)}


def written(node: fx.Node) -> list[fx.Node]:
    """The input nodes whose tensors this node may write to; for an operation we don't know, all of them."""
    out = [node.kwargs["out"]] if node.kwargs.get("out") is not None else []
    first = [node.args[0] if node.args else node.kwargs.get("input")]
    c = canonical.call(node)
    if c is not None:
        return _nodes([*out, c.args.get("input")] if c.inplace else out)
    if node.op == "call_method":
        name = str(node.target)
        return _nodes(out + (first if _writes_by_name(name) else []))
    if node.op != "call_function":
        return list(node.all_input_nodes) if node.op == "call_module" else []
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _nodes(_written_by_schema(target, node))
    if target in _INPLACE_OPERATORS:
        return _nodes(out + first)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return list(node.all_input_nodes) if _body_writes(node) else []
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
        return list(node.all_input_nodes) if any(o._schema.is_mutable for o in overloads) else []
    if not _is_torch(target):
        return list(node.all_input_nodes)
    name = getattr(target, "__name__", "")
    if _writes_by_name(name) or _inplace_flag(target, node):
        return _nodes(out + first)
    if name.startswith("_foreach"):
        return list(node.all_input_nodes)
    return _nodes(out)


def _writes_by_name(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in _INPLACE_METHODS


def _nodes(args: Iterable[Any]) -> list[fx.Node]:
    given = list(args)
    found: list[fx.Node] = []
    if given:  # most operations write nothing
        fx.map_arg(given, found.append)
    return found


def _written_by_schema(target: Any, node: fx.Node) -> list[Any]:
    result = []
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            result.append(node.args[position] if position < len(node.args) else node.kwargs.get(argument.name))
    return result


def _is_torch(target: Any) -> bool:
    module = getattr(target, "__module__", None) or getattr(type(target), "__module__", "") or ""
    if module in ("builtins", "method_descriptor"):
        module = getattr(getattr(target, "__objclass__", None), "__module__", module) or module
    return module.split(".")[0] in ("torch", "_operator", "operator", "math", "builtins", "einops")


def is_torch_function(node: fx.Node) -> bool:
    """Whether a node calls one of torch's or Python's own functions, not a user's operation."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace in ("aten", "prims")
    return not isinstance(node.target, torch._ops.OperatorBase) and _is_torch(node.target)


def _inplace_flag(target: Any, node: fx.Node) -> bool:
    if node.kwargs.get("inplace"):
        return True
    try:
        bound = inspect.signature(target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return False
    return bool(bound.arguments.get("inplace", False))


def _body_writes(node: fx.Node) -> bool:
    """Whether a higher-order operation may write to its inputs: its bodies write to theirs, or it has none."""
    bodies: list[Any] = []
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            body: Any = node.graph.owning_module
            for part in str(source.target).split("."):
                body = getattr(body, part, None)
            bodies.append(body)
    graphs = [body.graph for body in bodies if isinstance(body, fx.GraphModule)]
    return not graphs or any(_writes_to_inputs(graph) for graph in graphs)


def _writes_to_inputs(graph: fx.Graph) -> bool:
    inputs = set[int]().union(*(storages(n) for n in graph.nodes if n.op in ("placeholder", "get_attr")))
    targets = [target for n in graph.nodes for target in written(n)]
    return any(not (memory := storages(target)) or memory & inputs for target in targets)


def result(node: fx.Node) -> fx.Node:
    """The node whose tensor a node leaves its result in: itself, or for ``x[i] = y`` the ``x``."""
    if canonical.tensor(node) is None:
        targets = written(node)
        if len(targets) == 1 and canonical.tensor(targets[0]) is not None:
            return targets[0]
    return node


def same_view(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes stand for the same elements of the same memory, in the same order."""
    if a is b:
        return True
    x, y = canonical.tensor(a), canonical.tensor(b)
    if x is None or y is None or x.dtype != y.dtype or x.dim() != y.dim() or not shares_memory(a, b):
        return False
    sizes = zip((*x.shape, *x.stride(), x.storage_offset()), (*y.shape, *y.stride(), y.storage_offset()), strict=True)
    return all(same(m, n) for m, n in sizes)


def shares_memory(a: fx.Node, b: fx.Node) -> bool:
    """Whether the tensors of two nodes may overlap, by the memory of their fake tensors."""
    return bool(storages(a) & storages(b))


def storages(node: fx.Node) -> set[int]:
    """The memory of a node's tensors, as the fake tensors know it; empty if it isn't known."""
    found: set[int] = set()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.add(value.untyped_storage()._cdata)
        elif isinstance(value, (tuple, list)):
            for item in value:
                add(item)

    try:
        add(canonical.value(node))
    except (NotImplementedError, RuntimeError):  # a tensor without storage: sparse, or some subclasses
        return set()
    return found


def may_view(user: fx.Node, node: fx.Node) -> bool:
    """Whether ``user``, which takes ``node``, may return (a view of) its memory."""
    c = canonical.call(user)
    if c is not None:
        is_view = c.args.get("input") is node and (c.op in _VIEWS or c.inplace)
        return is_view or shares_memory(user, node)
    return node in written(user) or shares_memory(user, node)


def aliases(node: fx.Node) -> set[fx.Node]:
    """``node``, the nodes it may be a view of, and all that may be views of those."""
    found = {node}
    pending = [node]
    while pending:
        current = pending.pop()
        near = [u for u in current.users if may_view(u, current)]
        near += [i for i in current.all_input_nodes if may_view(current, i)]
        for other in near:
            if other not in found:
                found.add(other)
                pending.append(other)
    return found


_METADATA_ONLY = {
    **dict.fromkeys(
        [
            "new_full",
            "full_like",
            "new_ones",
            "new_zeros",
            "new_empty",
            "new_tensor",
            "ones_like",
            "zeros_like",
            "empty_like",
            "size",
            "dim",
        ],
        "input",
    ),
    "getattr": "input",
    "expand_as": "other",
    "view_as": "other",
    "cast": "other",
}


def metadata_input(node: fx.Node) -> fx.Node | None:
    """The input that a node uses for its shape, dtype or device only, as ``x`` in ``x.new_ones(3)``."""
    c = canonical.call(node)
    if c is None or c.op not in _METADATA_ONLY:
        return None
    if c.op == "getattr" and c.get("name") not in ("shape", "dtype", "device", "ndim"):
        return None
    if c.op == "cast":  # x.to(y), x.type_as(y)
        other = node.args[1] if len(node.args) > 1 else node.kwargs.get("other")
    else:
        other = c.get(_METADATA_ONLY[c.op])
    return other if isinstance(other, fx.Node) and canonical.tensor(other) is not None else None


def data_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs whose values (not just their sizes) decide the value of a node."""
    if canonical.tensor(node) is None and isinstance(canonical.value(node), (int, float, bool, torch.SymInt)):
        return []  # a size or a number: its metadata is its value
    metadata = metadata_input(node)
    return [i for i in node.all_input_nodes if i is not metadata]


def closure(node: fx.Node, before: fx.Node) -> list[fx.Node]:
    """Every node that has a say in the value of ``node`` when ``before`` runs, in program order.

    That is its inputs, and the nodes that write to it or to anything that shares memory with one of these.
    """
    position = order(node.graph)
    limit = position[before]
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current in found:
            continue
        found.add(current)
        pending.extend(data_inputs(current))
        if current.op == "placeholder" or canonical.tensor(current) is not None:
            pending.extend(_writers(current, position, limit))
    return sorted(found, key=position.__getitem__)


def _writers(node: fx.Node, position: dict[fx.Node, int], limit: int) -> list[fx.Node]:
    out = []
    seen, pending = {node}, [node]
    while pending:
        current = pending.pop()
        for user in current.users:
            if position[user] >= limit:
                continue
            if current in written(user):
                out.append(user)
            if user not in seen and may_view(user, current):
                seen.add(user)
                pending.append(user)
    return out
