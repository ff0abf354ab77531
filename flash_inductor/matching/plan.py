"""How the operands of a site become the op's [batch, heads, length, head dim], and its output the site's result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import safety
from .canonical import tensor
from .heads import Peeled, peel
from .products import Label, Operand, Scores, Values
from .program import Program, Refused


@dataclass(frozen=True)
class Input:
    """A node, and which of its labelled dims become batch, heads, length and head dim, in this order."""

    node: fx.Node
    labels: tuple[Label | None, ...]
    batch: tuple[Label, ...]
    heads: tuple[Label, ...]
    length: Label
    feature: Label

    @property
    def order(self) -> tuple[Label, ...]:
        return (*self.batch, *self.heads, self.length, self.feature)

    def size(self, label: Label) -> Any:
        value = tensor(self.node)
        return None if value is None or label not in self.labels else value.shape[self.labels.index(label)]


@dataclass(frozen=True)
class Plan:
    query: Input
    key: Input
    value: Input
    out: tuple[Label, ...]  # the dims of the site's result
    out_batch: tuple[Label, ...]
    out_heads: tuple[Label, ...]
    scale: float  # what was looked through under query and key
    looked_through: tuple[fx.Node, ...]

    @property
    def inputs(self) -> tuple[Input, Input, Input]:
        return self.query, self.key, self.value

    def sizes(self, label: Label) -> tuple[Input, Any]:
        """An input that has this label (the query first: a stripped repeat leaves key and value with fewer heads)."""
        for source in (self.query, self.value, self.key):
            if label in source.labels:
                return source, source.size(label)
        raise Refused(
            "a dim of the result belongs to none of query, key and value; "
            "expand query, key or value before the products"
        )

    def shape(self, which: Input) -> list[Any]:
        """The shape that an input has as the op sees it."""

        def merged(labels: Iterable[Label]) -> Any:
            total: Any = 1
            for label in labels:
                size = which.size(label)
                total = total * (self.sizes(label)[1] if size is None else size)
            return total

        return [merged(which.batch), merged(which.heads), which.size(which.length), which.size(which.feature)]


def make(
    program: Program,
    scores: Scores,
    values: Values,
    at: tuple[fx.Node, fx.Node],
    end: fx.Node,
    *,
    regrouped: bool = False,
    gqa: bool = False,
    peel_casts: bool = True,
) -> Plan:
    """Decide the layout.  ``at``: the score and the value product; ``end``: the site's last node.

    ``regrouped``: the leading dims were split or merged between the products.  ``gqa``: fewer heads in key and value.
    """
    lead = scores.lead
    head = lead[-1] if lead else None
    where = (at[0], at[0], at[1])
    operands = (scores.query, scores.key, values.value)
    states = [_safe_states(program, list(peel(program, o, w, head)), end) for o, w in zip(operands, where, strict=True)]
    if regrouped:
        if any(x not in o for o in operands[:2] for x in scores.lead) or any(
            x not in values.value for x in values.lead
        ):
            raise Refused("the heads are regrouped between the products and broadcast; keep one grouping")
        rest, groups, repeat = list(lead), list[Label](), 1
    else:
        rest, groups = _groups(lead, operands, states)
        repeat = states[1][-1].repeat if states[1][-1].repeat == states[2][-1].repeat else 1
        if groups or not rest or rest[-1] != head or head not in scores.query or gqa:
            repeat = 1
    casts = _common_upcast(states, values) if peel_casts else None
    q = _pick(states[0], set(), 1, casts, [*lead, scores.q, scores.feature])
    k = _pick(states[1], set(groups), repeat, casts, [*rest, scores.k, scores.feature])
    v = _pick(states[2], set(groups), repeat, None, [*rest, values.k, values.feature], computed=False)
    if k is None or v is None or q is None:  # what lies under K and V doesn't fit together: take them as they are
        rest, groups = _groups(lead, operands, [s[:1] for s in states])
        casts = None
        q, k, v = (s[0] for s in states)
    if regrouped:
        batch, heads, kv_heads = tuple(lead), tuple[Label, ...](), tuple[Label, ...]()
        v_batch = values.lead
    else:
        batch, heads, kv_heads = _split(rest, groups, gqa or (repeat != 1 and k.repeat != 1))
        v_batch = batch
    return Plan(
        Input(q.node, q.labels, batch, heads, scores.q, scores.feature),
        Input(k.node, k.labels, batch, kv_heads, scores.k, scores.feature),
        Input(v.node, v.labels, v_batch, kv_heads, values.k, values.feature),
        values.out,
        v_batch,
        heads,
        q.scale * k.scale,
        (*q.path, *k.path, *v.path),
    )


def _safe_states(program: Program, states: list[Peeled], end: fx.Node) -> list[Peeled]:
    """Without those that can't stand in for the operand: the op reads them at ``end``, not where the operand did.

    So they must not be written to before; nor after, because autograd keeps them, and kept something else.  And grad
    mode and autocast must be the same at both places.
    """
    base = program.storages(states[0].node)
    good = states[:1]
    for state in states[1:]:
        read, site = program.position[state.path[-1]], program.position[end]
        kept = program.storages(state.node) == base
        if program.writes_between(state.node, read, site if kept else len(program.nodes)):
            break
        if any(safety.changes_mode(n) for n in program.nodes[read:site]):
            break
        good.append(state)
    return good


def _groups(
    lead: tuple[Label, ...], operands: tuple[Operand, Operand, Operand], states: list[list[Peeled]]
) -> tuple[list[Label], list[Label]]:
    """The leading labels that key and value have, and those that only the query has: groups of native GQA."""
    query, key, value = operands
    dropped = [s[-1].dropped for s in states]
    absent = [
        x for x in lead if x in query and (x not in key or x in dropped[1]) and (x not in value or x in dropped[2])
    ]
    rest = [x for x in lead if x not in absent]
    # A group belongs to the heads; what comes before all others is a batch, over which K and V are expanded.
    first = lead.index(rest[0]) if rest else 0
    groups = [x for x in absent if lead.index(x) > first]
    return [x for x in lead if x not in groups], groups


def _split(rest: list[Label], groups: list[Label], has_heads: bool) -> tuple[tuple[Label, ...], ...]:
    """Batch labels, the query's head labels, key and value's head labels."""
    if len(rest) >= 2 or (rest and has_heads):
        return tuple(rest[:-1]), (rest[-1], *groups), (rest[-1],)
    return tuple(rest), tuple(groups), ()


def _common_upcast(states: list[list[Peeled]], values: Values) -> torch.dtype | None:
    """The dtype from which both query and key were upcast, if the value product is computed in it too.

    Products of two such numbers are exact in float32, which the op sums in, so nothing is lost.
    """
    found = {s[-1].upcast_from for s in states[:2]}
    value = tensor(values.value.node)
    dtype = found.pop() if len(found) == 1 else None
    return dtype if value is not None and dtype is value.dtype else None


def _pick(
    states: list[Peeled],
    dropped: set[Label],
    repeat: int,
    upcast_from: torch.dtype | None,
    order: list[Label],
    *,
    computed: bool = True,
) -> Peeled | None:
    """The state that spares most work; among those the first that needs no permutation, else the deepest."""
    must_drop = {x for x in dropped if x in states[0].labels}
    fitting = [
        s
        for s in states
        if s.dropped == must_drop
        and s.repeat == repeat
        and s.upcast_from in (None, upcast_from)
        and (computed or s.computed == 0)
    ]
    if not fitting:
        return None
    most = max(s.computed for s in fitting)
    fitting = [s for s in fitting if s.computed == most]
    for state in fitting:
        labels = [x for x in state.labels if x is not None]
        if labels == [x for x in order if x in labels]:
            return state
    return fitting[-1]
