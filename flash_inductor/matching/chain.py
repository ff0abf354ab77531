"""The walk from a softmax back to the score product."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from . import canonical, products, sinks
from .canonical import Arg, Call, tensor
from .products import Product
from .program import Program, Refused, constant, same_shape, same_size
from .scoring import Cast, Factor, Floor, Mask, Scale, Shift, Sink, Step, Tanh

MAX_STEPS = 64


@dataclass
class Chain:
    """What was found between the score product and a node, in execution order; ``nodes`` computed it."""

    product: Product
    steps: list[Step] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    regrouped: bool = False

    def then(self, node: fx.Node, *steps: Step, nodes: tuple[fx.Node, ...] = ()) -> Chain:
        self.steps.extend(steps)
        self.nodes.extend([*nodes, node])
        return self


def walk(program: Program, node: Arg, at: fx.Node, depth: int = 0) -> Chain:
    """The chain from the score product to what ``node`` holds when ``at`` runs.  Raises Refused."""
    if depth > MAX_STEPS:
        raise Refused(
            "the chain between the score product and the softmax is too long; apply scale and masks in fewer steps"
        )
    c = program.value(node, at)
    if c is None or tensor(c.node) is None:
        name = node.name if isinstance(node, fx.Node) else str(node)
        raise Refused(
            f"the scores come from `{name}`, which isn't a product of query and key; "
            "compute them with one matmul, bmm or einsum of query and key"
        )
    if c.op in products.OPS:
        return _product(program, c)
    step = STEPS.get(c.op)
    if step is None:
        raise Refused(
            f"`{c.op}` between the score product and the softmax isn't understood; "
            "write it as in docs/patterns.md, or call flash_inductor.attention"
        )
    return step(program, c, depth + 1)


def _product(program: Program, c: Call) -> Chain:
    chain = Chain(products.parse(c), nodes=[c.node])
    if c.op == "baddbmm":
        alpha, beta = constant(program, c.get("alpha", 1), c.node), constant(program, c.get("beta", 1), c.node)
        if alpha is None or beta not in (0.0, 1.0):
            raise Refused("baddbmm needs a constant alpha, and a beta of 0 or 1; use Python numbers, or matmul")
        chain.steps.append(Scale(alpha))
        if beta == 1.0:
            chain.steps.append(Mask("additive", c["input"], c.node))
    elif set(c.args) - {"input", "other", "equation", "operands"}:
        raise Refused(f"the score product has other arguments ({', '.join(sorted(c.args))}); use matmul, bmm or einsum")
    return chain


def _only(c: Call, *names: str) -> None:
    extra = [k for k, v in c.args.items() if k not in names and v is not None and not (k == "alpha" and v == 1)]
    if extra:
        raise Refused(f"the argument `{extra[0]}` of `{c.op}` on the scores isn't understood; leave it out")


def _inner(program: Program, c: Call, node: Arg, depth: int) -> Chain:
    """The chain up to an operand of ``c`` that is as large as the result."""
    if not isinstance(node, fx.Node) or not same_shape(tensor(node), tensor(c.node)):
        raise Refused(f"`{c.op}` broadcasts the scores to another shape; expand query or key before their product")
    return walk(program, node, c.node, depth)


def _scale(program: Program, c: Call, depth: int) -> Chain:
    _only(c, "input", "other")
    a, b = c["input"], c["other"]
    factor = constant(program, b, c.node)
    if factor is None and c.op == "mul" and (first := constant(program, a, c.node)) is not None:
        a, b, factor = b, a, first
    if factor is None:
        if not same_shape(tensor(a), tensor(c.node)) and c.op == "mul":
            a, b = b, a
        if not isinstance(b, fx.Node) or not _same_for_all_keys(b):
            raise Refused(
                f"the scores are {'multiplied' if c.op == 'mul' else 'divided'} by `{b}`, which is neither a constant "
                "nor a tensor that is the same for all keys; use a Python number (under dynamic=True, one that isn't "
                "an argument of the compiled function), or a tensor whose last dim is 1"
            )
        return _inner(program, c, a, depth).then(c.node, Factor(b, c.node, c.op == "div"))
    if c.op == "div":
        if factor == 0:
            raise Refused("the scores are divided by 0; divide by the square root of the head dim")
        factor = 1 / factor
    return _inner(program, c, a, depth).then(c.node, Scale(factor))


def _same_for_all_keys(node: fx.Node) -> bool:
    value = tensor(node)
    return value is not None and (value.dim() == 0 or (isinstance(value.shape[-1], int) and value.shape[-1] == 1))


def _tanh(program: Program, c: Call, depth: int) -> Chain:
    _only(c, "input")
    return _inner(program, c, c["input"], depth).then(c.node, Tanh())


def _same(program: Program, c: Call, depth: int) -> Chain:
    _only(c, "input", "memory_format")
    return _inner(program, c, c["input"], depth).then(c.node)


def _cast(program: Program, c: Call, depth: int) -> Chain:
    source, result = tensor(c["input"]), tensor(c.node)
    if source is None or result is None or source.device != result.device:
        raise Refused("the scores are moved to another device; keep query, key and value on one device")
    if not (result.dtype.is_floating_point and source.dtype.is_floating_point):
        raise Refused(f"the scores are cast to {result.dtype}; keep a floating-point dtype")
    return _inner(program, c, c["input"], depth).then(c.node, Cast(result.dtype))


def _dropout(program: Program, c: Call, depth: int) -> Chain:
    if c.get("training", True) is not False and constant(program, c.get("p", 0.5), c.node) != 0:
        raise Refused("the scores are dropped out before the softmax; drop out the probabilities instead")
    return _same(program, Call(c.op, {"input": c["input"]}, c.node), depth)


def _reshape(program: Program, c: Call, depth: int) -> Chain:
    source = c["input"]
    if not regroups_leading_dims(source, c.node):
        raise Refused(
            f"`{c.op}` rearranges the query or key dim of the scores; reshape only batch and heads between the products"
        )
    chain = walk(program, source, c.node, depth).then(c.node)
    if not same_shape(tensor(source), tensor(c.node)):
        chain.regrouped = True
    return chain


def _add(program: Program, c: Call, depth: int) -> Chain:
    _only(c, "input", "other")
    for scores, number in ((c["input"], c["other"]), (c["other"], c["input"])):
        if not isinstance(number, fx.Node) and constant(program, number, c.node) is not None:
            return _inner(program, c, scores, depth).then(c.node, Shift())
    chain, mask = _scores_and_other(program, c, depth)
    return chain.then(c.node, Mask("additive", mask, c.node))


def _scores_and_other(program: Program, c: Call, depth: int) -> tuple[Chain, fx.Node]:
    """Which operand of an addition leads to the score product, and the other one."""
    found: list[tuple[Chain, fx.Node]] = []
    reasons: list[Refused] = []
    for scores, mask in ((c["input"], c["other"]), (c["other"], c["input"])):
        if not isinstance(scores, fx.Node) or not isinstance(mask, fx.Node):
            raise Refused(
                "something that is no tensor is added to the scores; leave a number out, which changes no softmax"
            )
        try:
            chain = _inner(program, c, scores, depth)
        except Refused as reason:
            reasons.append(reason)
            continue
        found.append((chain, mask))
    if len(found) == 2:
        raise Refused(
            "the scores are a sum of two products (a bias that depends on the content); "
            "nothing to do: the op takes one product of query and key"
        )
    if not found:
        raise _best_reason(reasons)
    return found[0]


def _best_reason(reasons: list[Refused]) -> Refused:
    dull = ("isn't a product of query and key", "broadcasts the scores", "isn't understood")
    return min(reasons, key=lambda r: sum(d in str(r) for d in dull))


def _sub(program: Program, c: Call, depth: int) -> Chain:
    _only(c, "input", "other")
    scores, other = c["input"], c["other"]
    if c.op == "rsub" or not isinstance(other, fx.Node):
        raise Refused(
            "the scores are subtracted from something, or a number from them; "
            "leave the number out, which changes no softmax, and negate the query, not the scores"
        )
    nodes = _row_maximum(program, other, scores, c.node)
    if nodes is None:
        return _inner(program, c, scores, depth).then(c.node, Mask("additive", other, c.node, factor=-1.0))
    return _inner(program, c, scores, depth).then(c.node, Shift(), nodes=nodes)


def _lowest(program: Program, c: Call, depth: int) -> Chain:
    """The larger of the scores and the lowest number of their dtype: it changes scores of -inf only."""
    _only(c, "input", "other", "dim", "min")
    limits = [c.args[name] for name in ("other", "dim", "min") if c.get(name) is not None]
    limit = constant(program, limits[0], c.node) if len(limits) == 1 else None
    scores = tensor(c["input"])
    lowest = scores is not None and limit is not None and limit <= torch.finfo(scores.dtype).min
    if not lowest or (c.op == "max" and tensor(c["dim"]) is None):
        raise Refused(
            f"`{c.op}` between the score product and the softmax isn't understood; "
            "write it as in docs/patterns.md, or call flash_inductor.attention"
        )
    return _inner(program, c, c["input"], depth).then(c.node, Floor())


def _row_maximum(program: Program, node: fx.Node, scores: Arg, at: fx.Node) -> tuple[fx.Node, ...] | None:
    """The nodes that compute ``scores.max(-1, keepdim=True)``, if ``node`` is that."""
    nodes: list[fx.Node] = []
    c = program.value(node, at)
    while c is not None and c.op in ("detach", "getattr", "getitem"):
        if (c.op == "getitem" and c.get("index") != 0) or (c.op == "getattr" and c.get("name") != "values"):
            return None
        nodes.append(c.node)
        source = c["input"]
        # max returns a tuple, which has no memory of its own to look at
        c = program.value(source, c.node) if tensor(source) is not None else canonical.call(source)
    if c is None or c.op not in ("max", "amax") or c.get("keepdim") is not True or c["input"] is not scores:
        return None
    value, dim = tensor(c["input"]), c.get("dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if value is None or dim not in (-1, value.dim() - 1):
        return None
    assert isinstance(scores, fx.Node)
    if program.writes_between(scores, program.position[c.node], program.position[at]):
        return None
    return (c.node, *nodes[::-1])


def _masked_fill(program: Program, c: Call, depth: int) -> Chain:
    _only(c, "input", "mask", "value")
    fill = _fill(program, c.get("value"), c.node)
    return _inner(program, c, c["input"], depth).then(c.node, Mask("drop", c["mask"], c.node, fill))


def _where(program: Program, c: Call, depth: int) -> Chain:
    _only(c, "condition", "input", "other")
    yes, no = c.get("input"), c.get("other")
    if constant(program, no, c.node) is not None:
        scores, fill, kind = yes, _fill(program, no, c.node), "keep"
    elif constant(program, yes, c.node) is not None:
        scores, fill, kind = no, _fill(program, yes, c.node), "drop"
    else:
        raise Refused(
            "the scores are replaced by something that isn't a constant where they are masked; "
            "use masked_fill or where with float('-inf')"
        )
    return _inner(program, c, scores, depth).then(c.node, Mask(kind, c["condition"], c.node, fill))


def _fill(program: Program, value: Arg, at: fx.Node) -> float:
    fill = constant(program, value, at)
    if fill is None:
        raise Refused("the value of masked scores isn't a constant; use float('-inf')")
    return fill


def _cat(program: Program, c: Call, depth: int) -> Chain:
    found = sinks.column(c)
    return walk(program, found.scores, c.node, depth).then(c.node, Sink(found.sinks, c.node, found.first))


# What the walk understands, by canonical name; ``sites`` looks through the same to tell attention from other softmaxes.
STEPS: dict[str, Any] = {
    "cat": _cat,
    "mul": _scale,
    "div": _scale,
    "tanh": _tanh,
    "contiguous": _same,
    "clone": _same,
    "cast": _cast,
    "dropout": _dropout,
    "view": _reshape,
    "reshape": _reshape,
    "flatten": _reshape,
    "unflatten": _reshape,
    "view_as": _reshape,
    "add": _add,
    "sub": _sub,
    "rsub": _sub,
    "masked_fill": _masked_fill,
    "where": _where,
    "clamp": _lowest,
    "max": _lowest,
    "maximum": _lowest,
}


def regroups_leading_dims(source: Arg, result: Arg) -> bool:
    """Whether a reshape keeps the last two dims, so that in row-major order it only splits or merges the others."""
    a, b = tensor(source), tensor(result)
    return (
        a is not None
        and b is not None
        and a.dim() >= 2
        and b.dim() >= 2
        and all(same_size(a.shape[d], b.shape[d]) for d in (-2, -1))
    )
