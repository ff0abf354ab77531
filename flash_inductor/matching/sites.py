"""The two kinds of attention sites and what they compute: a call of SDPA, or a softmax between two products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import fx

from ..spec import MaskSpec
from . import canonical, chain, effects, mask_split, masks, plan, probabilities, products, safety, sinks, temperature
from .canonical import Call, call, tensor
from .masks import MaskProof, Refusal
from .operands import NO_OPERANDS, Operands, Table
from .plan import Plan
from .products import Operand, Scores, Values
from .program import Program, Refused, constant, same_size
from .scoring import interpret
from .temperature import Temperature


@dataclass
class Meaning:
    """What a site computes.  ``last`` is the node to replace, ``matched`` all that becomes useless with it."""

    last: fx.Node
    matched: list[fx.Node]
    plan: Plan
    scale: float | None
    softcap: float | None
    prove: Callable[[], MaskProof]
    autocast: torch.dtype | None
    dtypes: set[torch.dtype]
    table: Table
    operands: Operands = NO_OPERANDS  # without those that ``prove`` finds
    temperatures: tuple[Temperature, ...] = ()

    def scale_with(self, plan: Plan) -> float | None:
        if plan.scale == 1.0:
            return self.scale
        base = plan.query.size(plan.query.feature) ** -0.5 if self.scale is None else self.scale
        return base * plan.scale


@dataclass
class Match:
    """A site that was found; ``resolve`` tells what it computes, or raises Refused."""

    node: fx.Node
    form: str
    resolve: Callable[[], Meaning]
    last: fx.Node | None = None


def is_anchor(node: fx.Node) -> bool:
    c = call(node)
    return c is not None and c.op in ("sdpa", "softmax") and tensor(node) is not None


def find(program: Program, node: fx.Node) -> Match | None:
    """The site at an anchor; None if a softmax is not between two products."""
    c = call(node)
    if c is None:
        return None
    if c.op == "sdpa":
        return Match(node, "sdpa", lambda: _sdpa(program, c))
    if not (_follows_product(program, node) and (last := _reaches_product(node)) is not None):
        return None
    return Match(node, "softmax chain", lambda: _softmax_chain(program, c), last)


# --- SDPA

_SDPA_ARGS = frozenset(canonical.PARAMS["sdpa"])


def _sdpa(program: Program, c: Call) -> Meaning:
    node = c.node
    extra = set(c.args) - _SDPA_ARGS
    if extra:
        raise Refused(f"the argument {sorted(extra)[0]} of scaled_dot_product_attention isn't understood; leave it out")
    safety.check_backend_choice(program, node)
    operands = [c.get(role) for role in ("query", "key", "value")]
    tensors = [safety.check_tensor(x, role) for x, role in zip(operands, ("query", "key", "value"), strict=True)]
    result = tensor(node)
    if result is None or any(t.dim() < 2 for t in tensors):
        raise Refused("query, key and value need at least two dims: length and head dim; unsqueeze a length dim")
    dropout_p = probabilities.active_dropout(constant(program, c.get("dropout_p", 0.0), node))
    causal, gqa, mask = c.get("is_causal", False), c.get("enable_gqa", False), c.get("attn_mask")
    if not isinstance(causal, bool) or not isinstance(gqa, bool):
        raise Refused("is_causal and enable_gqa must be Python bools; pass True or False")
    if causal and mask is not None:
        raise Refused("both attn_mask and is_causal are given; give one of them")
    scale = c.get("scale")
    if scale is not None:
        scale = constant(program, scale, node)
        if scale is None:
            raise Refused("scale isn't a constant; pass a Python number (under dynamic=True, not as an argument)")
        if not math.isfinite(scale):
            raise Refused(f"the scale is {scale:g}; use a finite number")
    scores, values, grouped = _sdpa_labels(operands, tensors, result, gqa)
    dtypes = {t.dtype for t in tensors}
    autocast = result.dtype if dtypes != {result.dtype} else None
    layout = plan.make(program, scores, values, (node, node), node, gqa=grouped, peel_casts=False)

    table = Table(scores.out, (*result.shape[:-1], tensors[1].shape[-2]))

    def prove() -> MaskProof:
        if mask is None:
            return MaskProof(MaskSpec(upper=0) if causal else MaskSpec())
        value = tensor(mask)
        if value is None:
            raise Refused("the mask is not a tensor; pass a bool or float tensor, or None")
        kind = "keep" if value.dtype is torch.bool else "additive"
        return mask_split.resolve(program, mask, kind, table.place(layout, node, table.sizes))

    return Meaning(node, [], layout, scale, None, prove, autocast, set(), table, Operands(dropout_p=dropout_p))


def _sdpa_labels(
    operands: list[fx.Node], tensors: list[torch.Tensor], result: torch.Tensor, gqa: bool
) -> tuple[Scores, Values, bool]:
    """SDPA as two products; the third is whether key and value have fewer heads than the query."""
    lead = tuple(f"l{i}" for i in range(result.dim() - 2))
    names = []
    for t in tensors:
        labels = products.broadcast_labels(t.shape[:-2], result.shape[:-2], lead)
        if gqa and t.dim() > 2 and labels[-1] is None:
            labels = (*labels[:-1], lead[-1])  # one head for all is not a broadcast but the smallest group
        names.append(labels)
    grouped = gqa and not same_size(tensors[0].shape[-3], tensors[1].shape[-3])
    query = Operand(operands[0], (*names[0], "q", "d"))
    key = Operand(operands[1], (*names[1], "k", "d"))
    value = Operand(operands[2], (*names[2], "k", "e"))
    scores = Scores(query, key, (*lead, "q", "k"), "q", "k", "d")
    return scores, Values(value, (*lead, "q", "e"), "q", "k", "e", lead), grouped


# --- softmax between two products


def _softmax_chain(program: Program, c: Call) -> Meaning:
    softmax, result = c.node, tensor(c.node)
    if result is None or c.inplace or "out" in c.args:
        raise Refused(
            "the softmax writes to a tensor that was there before; leave out= out, and use softmax, not softmax_"
        )
    if c.get("dim") not in (-1, result.dim() - 1):
        raise Refused(
            f"the softmax runs over dim {c.get('dim')}, not over the last one, the keys; "
            "nothing to do: that is no attention over keys; permute the scores if it should be"
        )
    tail = probabilities.walk(program, softmax)
    last = tail.last
    before = chain.walk(program, c.get("input"), softmax)
    matched = list(dict.fromkeys([*before.nodes, softmax, *tail.nodes]))
    safety.check_users(program, matched, last)
    scoring = interpret(before.steps)
    tail.check_cut(scoring.sink)
    scores = products.scores_of(before.product)
    if (scoring.masks or scoring.factors) and not scores.masks_ok:
        raise Refused("scores that are masked or scaled by a tensor need the query and key dims last; permute them")
    names, regrouped = scores.out, False
    if before.regrouped or tail.regrouped:
        names, regrouped = probabilities.labels_of(tail, before.product.node, scores)
    last_call = call(last)
    assert last_call is not None  # the walk found it
    values = products.values_of(products.parse(last_call), tail.probabilities, names, scores.q, scores.k)
    autocast = _autocast(before.product, products.parse(last_call))
    layout = plan.make(
        program,
        scores,
        values,
        (before.product.node, last),
        last,
        regrouped=regrouped,
        peel_casts=autocast is None,
    )
    product = tensor(before.product.node)
    assert product is not None  # parse() checked it
    table = Table(scores.out, product.shape)

    def prove() -> MaskProof:
        proofs = []
        for mask in scoring.masks:
            here = tensor(mask.at)
            assert here is not None  # the walk came through it
            place = replace(table.place(layout, mask.at, here.shape), fill=mask.fill, factor=mask.factor)
            proof = mask_split.resolve(program, mask.mask, mask.kind, place)
            proofs.append(replace(proof, finite=proof.finite or mask.floor))
        both = masks.conjoin(proofs)
        if isinstance(both, Refusal):
            raise Refused(both.reason)
        return both

    operands = Operands(dropout_p=tail.dropout_p)
    if scoring.sink is not None:
        vector = sinks.vector(program, scoring.sink, scores.lead, layout.query.heads)
        operands = replace(operands, sinks=vector)
    # the nodes looked through under the operands are computed from, not replaced: they count for the region only
    out = tensor(last)
    assert out is not None  # parse() checked it
    # Probabilities in the result's dtype, because the values have it, are as precise as the result.
    between = {t.dtype for x in tail.nodes if (t := tensor(x)) is not None} - {out.dtype}
    dtypes = scoring.dtypes | {result.dtype} | between
    return Meaning(
        last, matched, layout, scoring.scale, scoring.softcap, prove, autocast, dtypes, table, operands,
        tuple(temperature.of(factor, layout, table) for factor in scoring.factors),
    )  # fmt: skip


def _autocast(first: products.Product, second: products.Product) -> torch.dtype | None:
    """The dtype that autocast gives both products, or None if it has no part in them."""
    found: set[torch.dtype | None] = set()
    results = set()
    for product in (first, second):
        inputs = {t.dtype for x in (product.left, product.right) if (t := tensor(x.node)) is not None}
        result = tensor(product.node)
        assert result is not None  # parse() checked it
        results.add(result.dtype)
        found.add(result.dtype if inputs != {result.dtype} else None)
    found.discard(None)
    if not found:
        return None
    if len(found) > 1 or results != found:
        raise Refused("autocast is on for one of the two products only; enter autocast around the whole attention")
    return found.pop()


# --- a cheap look at whether a softmax is attention at all

_ALSO_THROUGH_SCORES = {"copy", "detach", "minimum", "permute", "transpose"}  # besides the steps of the walk
_ALSO_THROUGH_PROBABILITIES = {"getitem", "slice", "narrow", "setitem"}
_LOOK_AT = 200


def _through_scores(c: Call) -> bool:
    return c.op in chain.STEPS or c.op in _ALSO_THROUGH_SCORES


def _follows_product(program: Program, softmax: fx.Node) -> bool:
    pending, seen = [softmax], {softmax}
    while pending and len(seen) < _LOOK_AT:
        node = pending.pop()
        written = [w for x in node.all_input_nodes for w, _ in program.writes_between(x, -1, program.position[node])]
        for source in [*node.all_input_nodes, *written]:
            c = call(source)
            value = tensor(source)
            if c is None or source in seen or value is None or value.dim() < 2:
                continue
            if c.op in products.OPS:
                return True
            if _through_scores(c):
                seen.add(source)
                pending.append(source)
    return False


def _reaches_product(softmax: fx.Node) -> fx.Node | None:
    pending, seen = [softmax], {softmax}
    while pending and len(seen) < _LOOK_AT:
        node = pending.pop(0)
        for user in node.users:
            c = call(user)
            if c is None or user in seen or node not in effects.data_inputs(user):
                continue
            if c.op in products.OPS:
                return user
            if _through_scores(c) or c.op in _ALSO_THROUGH_PROBABILITIES:
                seen.add(user)
                pending.append(user)
    return None
