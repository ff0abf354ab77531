"""Masks are proved for every size, or refused: each proof is compared with the mask's real value at several sizes."""

from __future__ import annotations

import functools

import pytest
import torch
from mask_cases import NEGATIVE, POSITIVE

from flash_inductor.config import override
from flash_inductor.matching.masks import MaskProof, Refusal, conjoin, prove
from flash_inductor.spec import MaskSpec


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


def test_conjunction():
    causal, window, anything = (MaskProof(MaskSpec(*b), sizes=(8, 8)) for b in ((None, 0), (-3, 2), (None, None)))
    assert conjoin([causal, window, anything]).mask == MaskSpec(-3, 0)
    assert conjoin([anything]).mask == MaskSpec()
    assert conjoin([]).mask == MaskSpec()
    below = MaskProof(MaskSpec(None, -1), finite=False, empty_rows=True, sizes=(8, 8))
    assert conjoin([below, window]).empty_rows
    assert isinstance(conjoin([below, MaskProof(MaskSpec(0, None), sizes=(8, 8))]), Refusal)
    finite = MaskProof(MaskSpec(-1, None), finite=True, sizes=(8, 8))
    assert isinstance(conjoin([finite, MaskProof(MaskSpec(None, -1), sizes=(8, 8))]), Refusal)


def test_conjunction_of_symbolic_bounds():
    def bottom_right(n, m):
        return torch.arange(m)[None] <= torch.arange(n)[:, None] + (m - n)

    def top_left(n, m):
        return torch.arange(m)[None] <= torch.arange(n)[:, None]

    fns = [("keep", bottom_right), ("keep", top_left), ("keep", lambda n, m: bottom_right(n, m) & top_left(n, m))]
    (a, _), (b, _), (both, _) = capture(fns, 6, 9, True)
    assert isinstance(a, MaskProof) and isinstance(b, MaskProof)
    assert isinstance(conjoin([a, b]), Refusal) and isinstance(both, Refusal)
    assert conjoin([a, a]).mask.upper is a.mask.upper


@pytest.mark.parametrize("q_len, kv_len", [(1, 5), (5, 1), (1, 1)])
def test_sizes_of_one(q_len, kv_len):
    fns = [
        ("keep", lambda n, m: torch.arange(m)[None] <= torch.arange(n)[:, None] + (m - n)),
        ("keep", lambda n, m: torch.arange(m)[None] <= torch.arange(n)[:, None]),
        ("keep", lambda n, m: (torch.arange(m)[None] < 3).expand(n, m)),
        ("keep", lambda n, m: (torch.arange(n)[:, None] < 3).expand(n, m)),
    ]
    for proof, value in capture(fns, q_len, kv_len, False):
        # one row or one column is a band whatever it shows, if that is in one piece
        assert isinstance(proof, MaskProof), proof.reason
        assert torch.equal(visible(value, "keep", q_len, kv_len), band(proof.mask, q_len, kv_len))
        assert proof.empty_rows == (not bool(value.any(-1).all()))


def test_static_masks_are_evaluated_within_a_limit():
    def segments(n, m):  # every segment id is the same, which only evaluation finds out
        ids = torch.arange(m) // (m + 1)
        return (ids[:n, None] == ids[None]) & (torch.arange(m) <= torch.arange(n)[:, None])

    (static, value), *_ = capture([("keep", segments)], 6, 9, False)
    assert static.mask == MaskSpec(None, 0) and torch.equal(visible(value, "keep", 6, 9), band(static.mask, 6, 9))
    with override(max_mask_elements=20):
        assert isinstance(capture([("keep", segments)], 6, 9, False)[0][0], Refusal)
    assert isinstance(capture([("keep", segments)], 6, 9, True)[0][0], Refusal)


def test_a_mask_given_as_an_input_is_refused_with_a_remedy():
    given = torch.ones(6, 9, dtype=torch.bool).tril()
    fns = [
        ("keep", lambda n, m, x: x[None]),
        ("keep", lambda n, m, x: x & (torch.arange(m) <= torch.arange(n)[:, None])),
    ]
    for proof, _ in capture(fns, 6, 9, False, (given,)):
        assert isinstance(proof, Refusal) and "graph input" in proof.reason and "is_causal=True" in proof.reason


def test_shapes_may_come_from_inputs():
    fns = [
        ("keep", lambda n, m, x: torch.ones_like(x, dtype=torch.bool).tril()),
        ("additive", lambda n, m, x: x.new_full((n, m), -1e9).triu(1)),
        ("drop", lambda n, m, x: x.new_ones(x.shape, dtype=torch.bool).triu(x.size(1) - x.size(0) + 1)),
    ]
    for dynamic in (False, True):
        proofs = [proof for proof, _ in capture(fns, 6, 9, dynamic, (torch.randn(6, 9),))]
        assert [at_sizes(p, 6, 9).upper for p in proofs] == [0, 0, 3]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("window", [None, 8])
def test_transformers_masks(window, dynamic):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    common = {**sizes, **heads, "use_cache": False, "attn_implementation": "sdpa"}
    if window is None:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common)).train()
    else:
        model = transformers.MistralForCausalLM(transformers.MistralConfig(sliding_window=window, **common)).train()
    proofs = []

    def backend(graph_module, _):
        (site,) = [n for n in graph_module.graph.nodes if "scaled_dot_product_attention" in str(n.target)]
        size = site.args[0].meta["example_value"].shape[-2]
        proofs.append(prove(site.kwargs["attn_mask"], "keep", size, size, site))
        return graph_module

    torch._dynamo.reset()
    torch.compile(model, backend=backend, dynamic=dynamic)(torch.randint(0, 32, (2, 12)))
    (proof,) = proofs
    assert isinstance(proof, MaskProof), proof.reason
    assert proof.mask == MaskSpec(None if window is None else 1 - window, 0) and not proof.buffers
