"""The walk from a softmax forward to the value product: what may happen to the probabilities on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from . import chain, products, safety, sinks
from .canonical import Call, call, tensor
from .products import Label, Scores
from .program import Program, Refused, constant, same_shape
from .scoring import Sink


@dataclass
class Tail:
    """What lies between a softmax and the product ``last`` that takes its result: ``nodes``, in execution order.

    ``dropout_p``: the share of the probabilities that is dropped.  ``cut``: the node that takes a sink's column off.
    """

    softmax: fx.Node
    last: fx.Node
    nodes: list[fx.Node] = field(default_factory=list)
    regrouped: bool = False
    dropout_p: float = 0.0
    cut: Call | None = None

    @property
    def probabilities(self) -> fx.Node:
        return self.nodes[-1] if self.nodes else self.softmax

    def check_cut(self, sink: Sink | None) -> None:
        """Raise Refused unless just the column of the sink was taken off."""
        if sink is None and self.cut is not None:
            raise Refused(
                "only a part of the probabilities is used, which the op can't do; "
                "slice keys and values before the products, or the result after them"
            )
        if sink is not None and (self.cut is None or not sinks.cuts_off(self.cut, sink)):
            raise Refused(
                "not just the column of the attention sink is taken off the probabilities; "
                "take off the sink's column alone, with [..., :-1]"
            )


def walk(program: Program, softmax: fx.Node) -> Tail:
    """From the softmax to the value product.  Raises Refused."""
    tail = Tail(softmax, softmax)
    while True:
        node = tail.probabilities
        user = _only_user(node)
        c = call(user)
        if c is not None and c.op in products.OPS - {"baddbmm"}:
            if set(c.args) - {"input", "other", "equation", "operands"}:
                raise Refused(
                    "an argument of the value product isn't understood; "
                    "use matmul, bmm or einsum with the probabilities and the values alone"
                )
            tail.last = user
            return tail
        if c is None or c.args.get("input") is not node:
            raise Refused(
                f"`{user.name}` between the softmax and the value product isn't understood; "
                "write it as in docs/patterns.md, or call flash_inductor.attention"
            )
        if c.inplace and c.op != "dropout":
            raise Refused(
                f"`{user.name}` writes to the probabilities in place; "
                "change keys or values instead, or use an operation that isn't in place"
            )
        _step(program, tail, c)
        tail.nodes.append(user)


def _only_user(node: fx.Node) -> fx.Node:
    users = safety.value_users(node)
    if len(users) != 1:
        others = ", ".join(f"`{u.name}`" for u in users)
        raise Refused(
            f"the probabilities have several users ({others}); don't ask for attention weights "
            "(output_attentions=False, need_weights=False)"
        )
    return users[0]


def _step(program: Program, tail: Tail, c: Call) -> None:
    source, result = tensor(c["input"]), tensor(c.node)
    if c.op == "dropout":
        p = dropout(program, c)
        if p and tail.dropout_p:
            raise Refused("the probabilities are dropped out twice; leave one of the dropouts out")
        tail.dropout_p = tail.dropout_p or p
    elif c.op in ("view", "reshape", "flatten", "unflatten"):
        if not chain.regroups_leading_dims(c["input"], c.node):
            raise Refused(
                f"`{c.node.name}` rearranges the query or key dim of the probabilities; "
                "reshape only batch and heads between the products"
            )
        tail.regrouped = tail.regrouped or not same_shape(source, result)
    elif c.op == "cast":
        if source is None or result is None or source.device != result.device or not result.is_floating_point():
            raise Refused(
                "the probabilities are moved to another device or no floating-point numbers; "
                "keep query, key and value on one device, in floating point"
            )
    elif c.op in ("getitem", "slice", "narrow"):
        if tail.cut is not None or tail.regrouped:
            raise Refused(
                "only a part of the probabilities is used, which the op can't do; "
                "slice keys and values before the products, or the result after them"
            )
        tail.cut = c
    elif c.op not in ("contiguous", "clone"):
        raise Refused(
            f"`{c.op}` between the softmax and the value product isn't understood; "
            "write it as in docs/patterns.md, or call flash_inductor.attention"
        )


def dropout(program: Program, c: Call) -> float:
    """The share that a dropout drops, 0 if it does nothing.  Raises Refused if that isn't known."""
    training = c.get("training", True)
    if training not in (True, False):
        raise Refused("whether the dropout is active isn't known; pass training as a Python bool")
    return active_dropout(constant(program, c.get("p", 0.5), c.node)) if training else 0.0


def active_dropout(p: float | None) -> float:
    """A dropout probability that the op can use.  Raises Refused."""
    if p is None:
        raise Refused("the dropout probability isn't a constant; use a Python number")
    if not 0 <= p < 1:
        raise Refused(f"dropout {p:g} of the probabilities; use a number from 0 to below 1")
    return p


def labels_of(tail: Tail, first: fx.Node, scores: Scores) -> tuple[tuple[Label, ...], bool]:
    """The labels of the probabilities' dims after reshapes: those of the scores if the reshapes cancel out."""
    after: Any = tensor(tail.probabilities)
    if same_shape(tensor(first), after):
        return scores.out, False
    if not scores.masks_ok:
        raise Refused(
            "the leading dims are regrouped while the key and query dims aren't last; "
            "permute the scores so that queries and keys are the last dims"
        )
    return (*(f"r{i}" for i in range(after.dim() - 2)), scores.q, scores.k), True
