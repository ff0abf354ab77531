"""Bias, mask, segments, sinks and dropout on the CPU, against the float64 reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from extra_cases import BANDS, CASES, FULL, SIZES, grad_mask, padding, rand, segments

from flash_inductor.functional import attention
from flash_inductor.ops import attn, attn_backward, cpu_problem
from flash_inductor.reference import attention_backward, attention_forward
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.testing import assert_close_to_reference, eager_attention, make_inputs


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request, monkeypatch):
    if request.param == "many blocks":
        monkeypatch.setattr(cpu_problem, "SHORT", 0)
        monkeypatch.setattr(cpu_problem, "BLOCK", 4)
        monkeypatch.setattr(cpu_problem, "TILE_ELEMENTS", 300)  # splits the batch, then the heads


def spec_of(scale=None, softcap=None, **window) -> AttentionSpec:
    return AttentionSpec(scale, MaskSpec.from_window(**window), softcap)


def results(inputs, case, options, lse_grad=True):
    """Outputs and gradients of the op, and what the gradients were of."""
    out, lse = attn(*inputs, **case, **options)
    generator = torch.Generator().manual_seed(3)
    grad_out = torch.randn(out.shape, generator=generator).to(out.dtype)
    grad_lse = torch.randn(lse.shape, generator=generator).to(lse.dtype) if lse_grad else None
    grads = attn_backward(grad_out, grad_lse, *inputs, out, lse, **case, **options, grad_mask=grad_mask(case))
    for grad, asked in zip(grads, grad_mask(case), strict=True):
        assert asked or grad.shape == (0,)
    wanted = [grad if asked else None for grad, asked in zip(grads, grad_mask(case), strict=True)]
    return [out, lse, *wanted], grad_out, grad_lse


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("band", BANDS)
def test_float64(case, band, blocks):
    """Only roundings of float64 apart: no wrong term can hide in a tolerance."""
    inputs = make_inputs(**SIZES, dtype=torch.float64)
    got, grad_out, grad_lse = results(inputs, case, BANDS[band])
    spec = spec_of(**BANDS[band])
    want = [*attention_forward(*inputs, spec, **case)]
    want += attention_backward(grad_out, grad_lse, *inputs, spec, **case)
    for name, a, b in zip(("out", "lse", "q", "k", "v", "bias", "sinks"), got, want, strict=True):
        if a is None:
            assert b is None
            continue
        exact = a.dtype == torch.float64
        tolerance = {"atol": 1e-10, "rtol": 1e-9} if exact else {"atol": 1e-5, "rtol": 8e-3}
        torch.testing.assert_close(a.double(), b, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "name", ["bias n1nn", "bfloat16 bias", "right padding", "documents", "sinks", "dropout", "all"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lse_grad", [True, False], ids=["lse grad", "no lse grad"])
def test_dtypes(name, dtype, lse_grad):
    inputs = make_inputs("bnhd", **SIZES, dtype=dtype)
    got, grad_out, grad_lse = results(inputs, CASES[name], BANDS["causal"], lse_grad)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    spec = spec_of(**BANDS["causal"])
    assert_close_to_reference(got, *inputs, spec, grad_out=grad_out, grad_lse=grad_lse, **CASES[name])


def test_a_wrong_gradient_is_noticed():
    """The comparison helper on the new results: 5 % off, or of another dropout, fails."""
    inputs = make_inputs(**SIZES)
    got, grad_out, _ = results(inputs, CASES["all"], {}, lse_grad=False)
    assert_close_to_reference(got, *inputs, grad_out=grad_out, **CASES["all"])
    for i in (5, 6):
        wrong = [x * 1.05 if j == i else x for j, x in enumerate(got)]
        with pytest.raises(AssertionError, match="grad_bias" if i == 5 else "grad_sinks"):
            assert_close_to_reference(wrong, *inputs, grad_out=grad_out, **CASES["all"])
    with pytest.raises(AssertionError, match="out: error"):
        assert_close_to_reference(
            got, *inputs, grad_out=grad_out, **{**CASES["all"], "rng_state": torch.tensor([1, 2])}
        )


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("form", ["nnnn", "n11n", "11nn"])
def test_agrees_with_sdpa(kind, form):
    query, key, value = make_inputs(**{**SIZES, "kv_heads": 4}, requires_grad=True)
    mask = rand(form) > -0.5 if kind == "bool" else rand(form).requires_grad_()
    given = {"mask": mask} if kind == "bool" else {"bias": mask}
    leaves = [query, key, value] + ([mask] if kind == "float" else [])
    want = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    got = attention(query, key, value, **given)
    torch.testing.assert_close(got, want)
    grad_out = torch.randn_like(want)
    torch.testing.assert_close(torch.autograd.grad(got, leaves, grad_out), torch.autograd.grad(want, leaves, grad_out))


def test_a_row_that_sees_nothing_is_that_of_sdpa():
    query, key, value = make_inputs(**{**SIZES, "kv_heads": 4}, requires_grad=True)
    mask = padding([0, 3], FULL[3])
    out, lse = attention(query, key, value, mask=mask, return_lse=True)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value, attn_mask=mask))
    assert not out[0].any() and (lse[0] == -torch.inf).all()
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    assert all(not x[0].any() and x.isfinite().all() for x in grads)


def test_sinks_are_a_column_of_the_softmax():
    """As gpt-oss writes it."""
    query, key, value = make_inputs(**SIZES, requires_grad=True)
    sinks = torch.randn(FULL[1], requires_grad=True)
    leaves = (query, key, value, sinks)
    want = eager_attention(query, key, value, AttentionSpec(mask=MaskSpec(None, 0)), sinks=sinks)
    got = attention(query, key, value, sinks=sinks, is_causal=True)
    torch.testing.assert_close(got, want)
    grad_out = torch.randn_like(want)
    torch.testing.assert_close(torch.autograd.grad(got, leaves, grad_out), torch.autograd.grad(want, leaves, grad_out))


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["query", "key", "value", "grad_out", "grad_lse", "bias"])
@pytest.mark.parametrize("name", ["mask nnnn", "right padding", "scattered segments", "bias with -inf", "all"])
def test_non_finite_values_reach_only_the_pairs_that_see_them(bad, where, name, blocks):
    case = dict(CASES[name])
    query, key, value = make_inputs(**SIZES)
    grad_out, grad_lse = torch.randn_like(query), torch.randn(query.shape[:3])
    if where == "bias":
        case["bias"] = case.get("bias", rand("1n1n")).clone()
        case["bias"][..., 2] = torch.nan
    else:
        tensors = {"query": query, "key": key, "value": value, "grad_out": grad_out, "grad_lse": grad_lse}
        tensors[where][0, 0, 2] = bad
    if case.get("dropout_p"):  # a dropped infinite value is 0 * inf in both, but which rows hold one is luck
        case = {k: v for k, v in case.items() if k not in ("dropout_p", "rng_state")}
    out, lse = attn(query, key, value, **case)
    grads = attn_backward(grad_out, grad_lse, query, key, value, out, lse, **case, grad_mask=grad_mask(case))
    want = [*attention_forward(query, key, value, **case)]
    want += attention_backward(grad_out, grad_lse, query, key, value, **case)
    assert not all(x.isfinite().all() for x in want[2:] if x is not None)
    for got, expected in zip((out, lse, *grads), want, strict=True):
        if expected is not None:
            finite = expected.isfinite()
            assert torch.equal(got.isfinite(), finite)
            assert torch.allclose(got[finite].double(), expected[finite], atol=1e-5, rtol=1e-4)


@pytest.fixture
def products(monkeypatch):
    """How many multiplications the batched products of a call do."""
    bmm = torch.bmm

    def measure(function) -> int:
        total = 0

        def count(a, b):
            nonlocal total
            total += a.shape[0] * a.shape[1] * a.shape[2] * b.shape[2]
            return bmm(a, b)

        monkeypatch.setattr(torch, "bmm", count)
        function()
        return total

    return measure


@pytest.mark.parametrize("explicit", [True, False], ids=["ranges given", "no ranges"])
def test_hidden_blocks_are_skipped(explicit, products):
    length = 2048
    query, key, value = make_inputs(batch=1, heads=1, q_len=length, head_dim=8)
    everything = products(lambda: attn(query, key, value, softcap=5.0))
    assert everything == 2 * length * length * 8
    ids = (torch.arange(length) // 256).int().unsqueeze(0)
    call = attention if explicit else attn
    packed = products(lambda: call(query, key, value, softcap=5.0, query_segments=ids, key_segments=ids))
    assert packed == everything // 8
    short = padding([512], length)
    assert products(lambda: call(query, key, value, softcap=5.0, mask=short)) == everything // 4
    opaque = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    assert products(lambda: call(query, key, value, softcap=5.0, mask=opaque)) < 0.6 * everything
    two = make_inputs(batch=2, heads=1, q_len=length, head_dim=8)
    both = torch.cat([padding([256], length), padding([1024], length, left=True)])
    assert products(lambda: call(*two, softcap=5.0, mask=both)) == everything * (256 + 1024) // length


def test_a_row_of_negligible_scores_is_a_mean_without_gradients():
    """What a finfo.min that hides everything does in eager code; see NEGLIGIBLE."""
    inputs = make_inputs(**SIZES)
    bias = torch.zeros(1, 1, FULL[2], 1)
    bias[:, :, 4] = torch.finfo(torch.float32).min
    bias[:, :, 6] = -1e9
    out, lse = attn(*inputs, bias)
    mean = inputs[2].mean(2).repeat_interleave(2, 1)
    torch.testing.assert_close(out[:, :, 4], mean)
    grads = attn_backward(torch.ones_like(out), None, *inputs, out, lse, bias, grad_mask=[True] * 4 + [False])
    assert not grads[0][:, :, [4, 6]].any() and not grads[3][:, :, [4, 6]].any()
    assert grads[0][:, :, 5].any()


@pytest.mark.parametrize("wanted", range(32))
def test_only_needed_gradients_are_computed(wanted):
    case = CASES["all"]
    inputs = make_inputs(**SIZES)
    out, lse = attn(*inputs, **case)
    full = attn_backward(torch.ones_like(out), None, *inputs, out, lse, **case, grad_mask=[True] * 5)
    mask = [bool(wanted >> i & 1) for i in range(5)]
    grads = attn_backward(torch.ones_like(out), None, *inputs, out, lse, **case, grad_mask=mask)
    for grad, want, asked in zip(grads, full, mask, strict=True):
        assert torch.allclose(grad, want, atol=1e-6) if asked else grad.shape == (0,)


def test_ranges_are_only_hints():
    inputs = make_inputs(batch=2, heads=2, q_len=300, kv_len=280)
    ids = {"query_segments": segments(1, 300, count=2), "key_segments": segments(2, 280, count=2)}
    full = {"key_range": torch.tensor([0, 280]).int().expand(2, 3, 2)}
    full["query_range"] = torch.tensor([0, 300]).int().expand(1, 3, 2)
    torch.testing.assert_close(attn(*inputs, **ids), attn(*inputs, **ids, **full))
