"""Masks that come into the body of a higher-order operation as an argument, as under gradient checkpointing.

In the body such a mask is an opaque tensor, though outside it was made from positions alone.  So what makes it is
copied into the body while that is rewritten.  Afterwards nothing of the copy is left, unless a site reads a smaller
tensor inside it (the padding under a causal mask), which then becomes an argument of the body too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from . import canonical, closed, effects, encoder_layer, mha, products
from .canonical import call, tensor, value

_MAX_NODES = 400  # a mask takes some dozens; what takes more is no mask
# operations that run a body on the arguments after it, and how many come between
_CALLS = {"tag_activation_checkpoint": 0, "wrap_activation_checkpoint": 0, "wrap": 0, "invoke_subgraph": 1}


@dataclass
class Body:
    """The graph of a body, and the nodes outside that run it."""

    graph: fx.Graph
    calls: list[fx.Node]
    first: int  # where in the calls' arguments the body's begin
    copies: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)  # argument, copy that stands in for it
    added: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)  # new placeholder, what it stands for outside
    nodes: list[fx.Node] = field(default_factory=list)  # all that was copied

    def outside(self, placeholder: fx.Node) -> fx.Node | None:
        """What a placeholder is given, if all calls give the same."""
        position = self.placeholders().index(placeholder)
        given = {call.args[self.first + position] for call in self.calls}
        node = given.pop() if len(given) == 1 else None
        return node if isinstance(node, fx.Node) else None

    def placeholders(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "placeholder"]


def look_outside(graph: fx.Graph, outer: fx.GraphModule | None) -> Body | None:
    """Copy what makes the masks of a body's sites into it; ``outer`` runs the body.  To be followed by `finish`."""
    body = _body(graph, outer)
    if body is None:
        return None
    arguments = {n: body.outside(n) for n in body.placeholders()}
    known = {outside: inside for inside, outside in arguments.items() if outside is not None}
    for placeholder in _read_by_scores(graph):
        source = arguments.get(placeholder)
        if source is None:
            continue
        if source.op == "placeholder":
            if "grapharg" in source.meta:  # a buffer keeps its name, by which its value can be read and guarded
                placeholder.meta.setdefault("grapharg", source.meta["grapharg"])
            continue
        recipe = _recipe(source, body.calls)
        if recipe is not None:
            _copy(body, recipe, placeholder, source, known)
    return body


def finish(body: Body, *, apply: bool = True) -> None:
    """Take back what no site needs, and give the rest as arguments if ``apply``."""
    for placeholder, copy in body.copies:
        copy.replace_all_uses_with(placeholder)
    left = set(body.graph.nodes)  # replacing a site takes away what only its mask needed
    for node in reversed(body.nodes):
        if node in left and not node.users:
            body.graph.erase_node(node)
    for placeholder, source in body.added:
        if not placeholder.users:
            body.graph.erase_node(placeholder)
        elif apply:
            for outer_call in body.calls:
                outer_call.args = (*outer_call.args, source)


def fragile(body: Body | None) -> frozenset[fx.Node]:
    """The arguments of an ``invoke_subgraph`` that a site's masks and biases must not be.

    What the op saves for its backward leaves the body as a result.  Inductor (torch 2.13) doesn't see that such a
    result shares memory with the argument, and uses the memory for something else in between.
    """
    if body is None or body.first != 1 + _CALLS["invoke_subgraph"] or not torch.is_grad_enabled():
        return frozenset()
    return frozenset(n for n in body.placeholders() if tensor(n) is not None)


def _body(graph: fx.Graph, outer: fx.GraphModule | None) -> Body | None:
    if outer is None:
        return None
    names = {name for name, child in outer.named_children() if child is graph.owning_module}
    refs = [n for n in outer.graph.nodes if n.op == "get_attr" and n.target in names]
    calls = list(dict.fromkeys(user for ref in refs for user in ref.users))
    count = sum(n.op == "placeholder" for n in graph.nodes)
    firsts = set()
    for node in calls:
        between = _CALLS.get(getattr(node.target, "__name__", "")) if node.op == "call_function" else None
        if between is None or node.args[0] not in refs or len(node.args) != 1 + between + count:
            return None
        firsts.add(1 + between)
    return Body(graph, calls, firsts.pop()) if len(firsts) == 1 else None


def _read_by_scores(graph: fx.Graph) -> list[fx.Node]:
    """The placeholders that have a say in masks and biases: what lies before a softmax, except behind products."""
    pending: list[Any] = []
    for node in graph.nodes:
        c = call(node)
        opener = next((m for m in (mha, encoder_layer) if m.is_call(node)), None)
        if opener is not None:
            pending += opener.masks(node)
        elif c is not None and c.op == "sdpa":
            pending.append(c.get("attn_mask"))
        elif c is not None and c.op == "softmax":
            pending.append(c.get("input"))
    found: dict[fx.Node, None] = {}
    while pending:
        node = pending.pop()
        if not isinstance(node, fx.Node) or node in found:
            continue
        found[node] = None
        c = call(node)
        if c is not None and c.op in products.OPS:
            pending.append(c.get("input") if c.op == "baddbmm" else None)
        else:
            pending.extend(effects.data_inputs(node))
    return [n for n in graph.nodes if n in found and n.op == "placeholder" and tensor(n) is not None]


def _recipe(source: fx.Node, calls: list[fx.Node]) -> list[fx.Node] | None:
    """The nodes that make ``source``, in order, if they do nothing else and would make the same anywhere."""
    nodes = effects.closure(source, calls[0])
    if len(nodes) > _MAX_NODES or any(effects.closure(source, other) != nodes for other in calls[1:]):
        return None
    leaves = [n for n in nodes if n.op in ("placeholder", "get_attr")]
    for node in nodes:
        result = tensor(node)
        if node in leaves:
            if result is not None and (isinstance(result, torch.nn.Parameter) or result.requires_grad):
                return None
        elif _is_number(node):
            continue
        elif not closed.is_repeatable(node):
            return None
        elif any(effects.shares_memory(target, leaf) for target in effects.written(node) for leaf in leaves):
            return None  # it would be written twice
    return nodes


def _is_number(node: fx.Node) -> bool:
    return isinstance(value(node), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _copy(
    body: Body, recipe: list[fx.Node], placeholder: fx.Node, source: fx.Node, known: dict[fx.Node, fx.Node]
) -> None:
    computed = {n for n in recipe if n.op not in ("placeholder", "get_attr") and not _is_number(n)}
    copied: dict[fx.Node, fx.Node] = {}
    last = body.placeholders()[-1]
    first_node = last.next

    def inside(node: fx.Node) -> Any:
        if node in copied:
            return copied[node]
        if node in known:
            return known[node]
        number = canonical.number(node)
        if number is not None:
            return number
        with body.graph.inserting_before(first_node):
            new = body.graph.placeholder(node.name)
        new.meta.update(node.meta)
        body.added.append((new, node))
        known[node] = new
        return new

    for node in recipe:
        if node in computed:
            with body.graph.inserting_before(first_node):
                copied[node] = body.graph.node_copy(node, inside)
            body.nodes.append(copied[node])
    copy = copied[source]
    placeholder.replace_all_uses_with(copy)
    body.copies.append((placeholder, copy))
