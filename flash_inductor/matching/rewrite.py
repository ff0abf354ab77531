"""Finds attention in a graph and replaces it by the op."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import fx

from .. import support
from .._compat import buffers, checkpoint
from ..config import get_config
from ..ops import attn, choice
from ..report import Site, record
from ..spec import AttentionSpec
from . import bodies, canonical, effects, emit, encoder_layer, locate, mha, safety, scope, sites
from .operands import check_kept
from .plan import Plan
from .program import Program, Refused


@dataclass
class _Outcome:
    plan: Plan | None = None
    spec: AttentionSpec | None = None
    kernel: str | None = None
    reason: str | None = None
    shapes: dict[str, str] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()


def rewrite_graph(graph: fx.Graph, *, apply: bool = True, outer: fx.GraphModule | None = None) -> list[Site]:
    """Find the attention sites of a graph, replace those that mean an AttentionSpec, and record all of them.

    Args:
        graph: torch IR as Dynamo captures it (``meta["example_value"]``) or pre-dispatch ATen (``meta["val"]``).
        apply: False leaves the graph as it is; the sites are those that would be found and replaced.
        outer: the module that runs the graph as the body of a higher-order op.
    """
    if not apply:
        copy = fx.Graph(graph.owning_module)
        copy.output(copy.graph_copy(graph, {}))
        graph = copy
    body = bodies.look_outside(graph, outer)
    try:
        found = _rewrite(graph, bodies.fragile(body))
    finally:
        if body is not None:
            bodies.finish(body, apply=apply)
    if apply and any(site.replaced for site in found):
        checkpoint.save_as_sdpa(graph.owning_module, attn)
    for result in found:
        record(result)
    return found


def _rewrite(graph: fx.Graph, fragile: frozenset[fx.Node]) -> list[Site]:
    found: list[Site] = []
    _drop_unused_parts(graph)
    program = Program(graph)
    program.fragile = fragile
    for anchor in list(graph.nodes):
        replace: Callable[[Program, _Outcome], None]
        opener = next((m for m in (mha, encoder_layer) if m.is_call(anchor)), None)
        if opener is not None:
            form, place, replace = opener.FORM, anchor, partial(_replace_inside, anchor, opener.open_call)
        elif not sites.is_anchor(anchor):
            continue
        else:
            match = sites.find(program, anchor)
            if match is None:
                continue
            form, place, replace = match.form, match.last or anchor, partial(_replace, match)
        outcome = _Outcome()
        where, source = locate.location(place)
        module = locate.module(place)
        try:
            unwanted = scope.left_out(place, where)
            if unwanted is not None:
                raise Refused(unwanted)
            replace(program, outcome)
            program = Program(graph, program)
        except Refused as refusal:
            outcome.reason = str(refusal)
        found.append(
            Site(
                node=anchor.name,
                form=form,
                replaced=outcome.reason is None,
                spec=outcome.spec,
                reason=outcome.reason,
                location=where,
                source=source,
                module=module,
                shapes=outcome.shapes,
                kernel=outcome.kernel if outcome.reason is None else None,
                nodes=outcome.nodes,
            )
        )
    return found


def _drop_unused_parts(graph: fx.Graph) -> None:
    """Erase ``x.max(-1)[1]`` and ``x.clone()`` that nobody uses: Dynamo leaves such nodes, and they look like users."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op not in ("call_function", "call_method"):
            continue
        call = canonical.call(node)
        part = node.target is operator.getitem and isinstance(canonical.value(node.args[0]), (tuple, list))
        copy = call is not None and not call.inplace and call.op in ("clone", "contiguous", "detach", "cast")
        if part or copy:
            graph.erase_node(node)


def _replace_inside(
    node: fx.Node, open_call: Callable[[Program, fx.Node], mha.Opened], program: Program, outcome: _Outcome
) -> None:
    """Replace the attention inside a call that does more.  Raises Refused, the graph unchanged."""
    opened = open_call(program, node)
    try:
        inner = Program(node.graph, program)
        match = sites.find(inner, opened.sdpa)
        if match is None:
            raise Refused("the attention inside isn't understood; pass plain tensors and masks, or report this")
        _replace(match, inner, outcome)
    except Exception:
        opened.close()
        raise
    opened.commit()


def _replace(match: sites.Match, program: Program, outcome: _Outcome) -> None:
    """Replace one site; fills in ``outcome`` as far as it gets.  Raises Refused, the graph unchanged, if it can't."""
    program.assumed.clear()
    meaning = match.resolve()
    plan, last = meaning.plan, meaning.last
    outcome.nodes = tuple(dict.fromkeys(node.name for node in (*meaning.matched, *plan.looked_through, last)))
    outcome.shapes = {
        role: locate.shape(x.node) for role, x in zip(("query", "key", "value"), plan.inputs, strict=True)
    }
    values = [safety.check_tensor(x.node, role) for role, x in zip(("query", "key", "value"), plan.inputs, strict=True)]
    device = values[0].device
    if any(x.device != device for x in values) or device.type not in ("cpu", "cuda"):
        raise Refused(
            f"the tensors are on {', '.join(str(x.device) for x in values)}; move them to one device, cpu or cuda"
        )
    if device.type == "cpu" and get_config().cpu == "off":
        raise Refused(
            'attention on the CPU is left alone (FLASH_INDUCTOR_CPU=off); unset the variable, or set Config.cpu to "on"'
        )
    safety.check_worth(device, plan.query.size(plan.query.length))
    shapes = []
    for role, (batch, heads, length, dim) in zip(("query", "key", "value"), map(plan.shape, plan.inputs), strict=True):
        sizes = [batch, program.assume_size(heads), length, program.assume_size(dim)]
        if None in sizes:
            raise Refused(
                f"the {role}'s number of heads or head dim is marked dynamic; mark only batch and length as dynamic"
            )
        shapes.append(sizes)
    safety.check_region(program, [*meaning.matched, *plan.looked_through], last, [x.node for x in plan.inputs])
    dtype = meaning.autocast
    if dtype is None:
        dtype = values[0].dtype
        for other in values[1:]:
            dtype = torch.promote_types(dtype, other.dtype)
    if torch.float64 in meaning.dtypes and dtype is not torch.float64:
        raise Refused("the scores are computed in float64 from narrower inputs; cast query, key and value instead")
    for narrow in meaning.dtypes:
        if torch.finfo(narrow).eps > torch.finfo(dtype).eps:
            raise Refused(
                f"scores or probabilities are rounded to {narrow}, which is less precise than the inputs' {dtype}; "
                "keep the inputs' dtype, or cast query, key and value"
            )
    proof = meaning.prove()
    operands = meaning.operands.merged(proof.operands)
    check_kept(program, [*operands.parts, *(t.part for t in meaning.temperatures)])
    if any(effects.shares_memory(part.node, x) for part in operands.parts for x in program.fragile):
        raise Refused("the mask is an argument of a nested_compile_region, which Inductor overwrites; make it inside")
    spec = AttentionSpec(
        scale=meaning.scale_with(plan), mask=proof.mask, softcap=meaning.softcap, extras=operands.words()
    )
    outcome.spec = spec
    q, k, v = shapes
    name = str(dtype).removeprefix("torch.")
    reasons = support.unsupported_reasons(spec, q, k, v, name, device.type)
    if reasons:
        raise Refused(" ".join(reasons))
    chosen = choice.of_site(spec, q, k, v, dtype, device)
    lowering = get_config().lowering
    outcome.kernel = support.kernel_name(spec, q, k, v, name, device.type, lowering=lowering, chosen=chosen)
    private = safety.written_after(program, last)
    emitter, node = emit.replacement(
        last,
        plan,
        spec,
        dtype=dtype,
        autocast=meaning.autocast,
        keep_strides=safety.strides_matter(last),
        private=private,
        operands=operands,
        table=meaning.table,
        temperatures=meaning.temperatures,
        blind_mean=proof.finite and bool(operands.mask or operands.query_segments is not None),
    )
    if proof.buffers and not buffers.guard_unchanged(proof.buffers):
        emitter.undo()
        raise Refused("the mask is a buffer whose value can't be guarded; build it in forward from torch.arange")
    program.guard_assumed()
    last.replace_all_uses_with(node)
    emit.prune([last, *reversed(meaning.matched)], {last, *meaning.matched})
