"""Masks are proved for every size, or refused: each proof is compared with the mask's real value at several sizes."""

from __future__ import annotations

import functools

import pytest
import torch

from flash_inductor.config import override
from flash_inductor.matching.masks import MaskProof, Refusal, conjoin, prove
from flash_inductor.spec import MaskSpec

from mask_cases import NEGATIVE, POSITIVE


def capture(fns, q_len, kv_len, dynamic, extra=()):
    """prove() on the graph that Dynamo captures of all ``fn(q_len, kv_len, *extra)`` at once, and the real masks.

    ``fns`` is a list of (kind, fn).
    """
    results = []

    def backend(graph_module, _):
        (output,) = graph_module.graph.find_nodes(op="output")
        scores = next(n for n in graph_module.graph.nodes if n.op == "placeholder" and "scores" in str(n.target))
        n, m = scores.meta["example_value"].shape[-2:]
        for (kind, _), mask in zip(fns, output.args[0][1:], strict=True):
            results.append(prove(mask, kind, n, m, output))
        return graph_module

    def run(scores, *extra):
        return scores + 1, *[fn(*scores.shape[-2:], *extra) for _, fn in fns]

    torch._dynamo.reset()
    scores = torch.zeros(2, 4, q_len, kv_len)
    values = torch.compile(run, backend=backend, dynamic=dynamic, fullgraph=True)(scores, *extra)[1:]
    assert len(results) == len(fns)
    return list(zip(results, values, strict=True))


@functools.cache
def captured(table, dynamic):
    """One compilation for all the cases of a table: (proof, value) by name."""
    cases = {"positive": POSITIVE, "negative": NEGATIVE}[table]
    return dict(zip(cases, capture([case[:2] for case in cases.values()], 6, 9, dynamic), strict=True))


def visible(value, kind, q_len, kv_len):
    if kind == "additive":
        assert bool(((value == 0) | (value <= -1e4)).all())
        value = value == 0
    elif kind == "drop":
        value = ~value
    return value.expand(2, 4, q_len, kv_len)


def band(spec, q_len, kv_len):
    distance = torch.arange(kv_len)[None, :] - torch.arange(q_len)[:, None]
    keep = torch.ones(q_len, kv_len, dtype=torch.bool)
    if spec.lower is not None:
        keep &= distance >= spec.lower
    if spec.upper is not None:
        keep &= distance <= spec.upper
    return keep.expand(2, 4, q_len, kv_len)


def at_sizes(proof, q_len, kv_len):
    """The proof's band with its symbols replaced by sizes (which are distinct, so each symbol is known by its hint)."""

    def number(bound):
        if bound is None or isinstance(bound, int):
            return bound
        q, kv = (s.node.expr for s in proof.sizes)
        return int(bound.node.expr.subs({q: q_len, kv: kv_len}))

    return MaskSpec(number(proof.mask.lower), number(proof.mask.upper))


SIZES = [(7, 7), (6, 9), (5, 12), (8, 11)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", POSITIVE)
def test_proved_masks_are_what_they_are(name, dynamic):
    kind, fn, lower, upper = POSITIVE[name]
    q_len, kv_len = 6, 9
    proof, value = captured("positive", dynamic)[name]
    assert isinstance(proof, MaskProof), proof.reason
    assert torch.equal(visible(value, kind, q_len, kv_len), band(at_sizes(proof, q_len, kv_len), q_len, kv_len))
    for n, m in SIZES if dynamic else [(q_len, kv_len)]:
        spec = at_sizes(proof, n, m)
        assert (spec.lower, spec.upper) == (lower and lower(n, m), upper and upper(n, m))
        assert torch.equal(visible(fn(n, m), kind, n, m), band(spec, n, m))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NEGATIVE)
def test_other_masks_are_refused(name, dynamic):
    proof, _ = captured("negative", dynamic)[name]
    assert isinstance(proof, Refusal), proof
    assert len(proof.reason.split()) > 3
