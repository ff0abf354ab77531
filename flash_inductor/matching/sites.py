"""The two kinds of attention sites and what they compute: a call of SDPA, or a softmax between two products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import fx

from ..spec import MaskSpec
from . import canonical, chain, effects, masks, plan, products, safety
from .canonical import Call, call, tensor
from .masks import MaskProof, Refusal
from .operands import NO_OPERANDS, Operands, Table
from .plan import Plan
from .products import Operand, Scores, Values
from .program import Program, Refused, constant, same_shape, same_size


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
        raise Refused(f"the argument {sorted(extra)[0]} of scaled_dot_product_attention isn't understood")
    safety.check_backend_choice(program, node)
    operands = [c.get(role) for role in ("query", "key", "value")]
    tensors = [safety.check_tensor(x, role) for x, role in zip(operands, ("query", "key", "value"), strict=True)]
    result = tensor(node)
    if result is None or any(t.dim() < 2 for t in tensors):
        raise Refused("query, key and value need at least two dims: length and head dim")
    p = constant(program, c.get("dropout_p", 0.0), node)
    if p is None:
        raise Refused("dropout_p isn't a constant; pass a Python number")
    if p != 0:
        raise Refused(f"dropout {p:g} of the probabilities is active; set it to 0 or call model.eval()")
    causal, gqa, mask = c.get("is_causal", False), c.get("enable_gqa", False), c.get("attn_mask")
    if not isinstance(causal, bool) or not isinstance(gqa, bool):
        raise Refused("is_causal and enable_gqa must be Python bools")
    if causal and mask is not None:
        raise Refused("both attn_mask and is_causal are given; give one of them")
    scale = c.get("scale")
    if scale is not None:
        scale = constant(program, scale, node)
        if scale is None:
            raise Refused("scale isn't a constant; pass a Python number (under dynamic=True, not as an argument)")
        if not 0 < scale < float("inf"):
            raise Refused(f"the scale is {scale:g}; a positive number is needed")
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
            raise Refused("the mask is not a tensor")
        kind = "keep" if value.dtype is torch.bool else "additive"
        proof = masks.prove(mask, kind, tensors[0].shape[-2], tensors[1].shape[-2], node)
        return _or_refuse(proof)

    return Meaning(node, [], layout, scale, None, prove, autocast, set(), table)


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
        raise Refused("the softmax writes to a tensor that was there before")
    if c.get("dim") not in (-1, result.dim() - 1):
        raise Refused(f"the softmax runs over dim {c.get('dim')}, not over the last one, the keys")
    tail, last, regrouped = _to_value_product(program, softmax)
    before = chain.walk(program, c.get("input"), softmax)
    matched = list(dict.fromkeys([*before.nodes, softmax, *tail]))
    safety.check_users(program, matched, last)
    scoring = chain.interpret(before.steps)
    scores = products.scores_of(before.product)
    if scoring.masks and not scores.masks_ok:
        raise Refused("masked scores need the query and key dims last; permute them")
    probabilities = tail[-1] if tail else softmax
    names = scores.out
    if before.regrouped or regrouped:
        names, regrouped = _names_after(before.product.node, probabilities, scores)
    last_call = call(last)
    assert last_call is not None  # _to_value_product found it
    values = products.values_of(products.parse(last_call), probabilities, names, scores.q, scores.k)
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
    table = tensor(before.product.node)
    assert table is not None  # parse() checked it

    def prove() -> MaskProof:
        proofs = []
        for mask in scoring.masks:
            proof = _or_refuse(masks.prove(mask.mask, mask.kind, table.shape[-2], table.shape[-1], mask.at))
            if mask.kind == "additive" and mask.factor < 1 and proof.finite:
                raise Refused(
                    "the scores are scaled down after a finite mask is added, and so is the mask; scale before"
                )
            if mask.kind != "additive" and mask.fill != float("-inf"):
                proof = replace(proof, finite=True)
            proofs.append(proof)
        return _or_refuse(masks.conjoin(proofs))

    # the nodes looked through under the operands are computed from, not replaced: they count for the region only
    dtypes = scoring.dtypes | {result.dtype}
    return Meaning(
        last, matched, layout, scoring.scale, scoring.softcap, prove, autocast, dtypes, Table(scores.out, table.shape)
    )


def _or_refuse(proof: MaskProof | Refusal) -> MaskProof:
    if isinstance(proof, Refusal):
        raise Refused(proof.reason)
    return proof


def _to_value_product(program: Program, softmax: fx.Node) -> tuple[list[fx.Node], fx.Node, bool]:
    """The nodes between the softmax and the value product, that product, and whether leading dims were regrouped."""
    node, regrouped = softmax, False
    tail: list[fx.Node] = []
    while True:
        users = safety.value_users(node)
        if len(users) != 1:
            others = ", ".join(f"`{u.name}`" for u in users)
            raise Refused(
                f"the probabilities have several users ({others}); don't ask for attention weights "
                "(output_attentions=False, need_weights=False)"
            )
        user = users[0]
        c = call(user)
        if c is None:
            raise Refused(f"`{user.name}` between the softmax and the value product isn't understood")
        if c.op in products.OPS - {"baddbmm"}:
            if set(c.args) - {"input", "other", "equation", "operands"}:
                raise Refused("an argument of the value product isn't understood")
            return tail, user, regrouped
        if c.args.get("input") is not node:
            raise Refused(f"`{user.name}` between the softmax and the value product isn't understood")
        if c.op == "dropout":
            chain.require_inactive_dropout(program, c)
        elif c.op in ("view", "reshape", "flatten", "unflatten"):
            if not chain.regroups_leading_dims(node, user):
                raise Refused(f"`{user.name}` rearranges the query or key dim of the probabilities")
            regrouped = regrouped or not same_shape(tensor(node), tensor(user))
        elif c.op == "cast":
            source, target = tensor(node), tensor(user)
            if source is None or target is None or source.device != target.device or not target.is_floating_point():
                raise Refused("the probabilities are moved to another device or no floating-point numbers")
        elif c.op in ("getitem", "slice", "narrow"):
            raise Refused("only a part of the probabilities is used (attention sinks?), which the op can't do")
        elif c.op not in ("contiguous", "clone"):
            raise Refused(f"`{c.op}` between the softmax and the value product isn't understood")
        if c.inplace and c.op != "dropout":
            raise Refused(f"`{user.name}` writes to the probabilities in place")
        tail.append(user)
        node = user


def _names_after(first: fx.Node, probabilities: fx.Node, scores: Scores) -> tuple[tuple[products.Label, ...], bool]:
    """The labels of the probabilities' dims after reshapes: those of the scores if the reshapes cancel out."""
    if same_shape(tensor(first), tensor(probabilities)):
        return scores.out, False
    if not scores.masks_ok:
        raise Refused("the leading dims are regrouped while the key and query dims aren't last")
    after = tensor(probabilities)
    assert after is not None  # found by its metadata
    return (*(f"r{i}" for i in range(after.dim() - 2)), scores.q, scores.k), True


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
        raise Refused("autocast is on for one of the two products only")
    return found.pop()


# --- a cheap look at whether a softmax is attention at all

_THROUGH_SCORES = frozenset(
    "add sub rsub mul div tanh where masked_fill cast dropout contiguous clone view reshape flatten unflatten cat "  # noqa: SIM905
    "clamp transpose permute maximum minimum detach copy".split()
)
_THROUGH_PROBABILITIES = _THROUGH_SCORES | {"getitem", "slice", "narrow", "setitem"}
_LOOK_AT = 200


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
            if c.op in _THROUGH_SCORES:
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
            if c.op in _THROUGH_PROBABILITIES:
                seen.add(user)
                pending.append(user)
    return None
