"""The CPU kernels against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from flash_inductor.ops import attn, attn_backward, cpu, cpu_problem
from flash_inductor.reference import attention_backward, attention_forward
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.testing import LAYOUTS, assert_close_to_reference, make_inputs

OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "bottom-right": {"is_causal": True, "diagonal": 7},
    "some rows blind": {"is_causal": True, "diagonal": -5},
    "last rows blind": {"window_left": 0, "diagonal": 9},
    "window": {"is_causal": True, "window_left": 6},
    "both sides": {"window_left": 3, "window_right": 4, "diagonal": 1},
    "self": {"window_left": 0, "window_right": 0},
    "all blind": {"window_right": 0, "diagonal": -1000},
    "softcap": {"softcap": 1.5},
    "everything": {"is_causal": True, "window_left": 5, "softcap": 2.0, "scale": 0.4, "diagonal": 2},
    "negative scale": {"is_causal": True, "scale": -0.3},
    "zero scale": {"scale": 0.0},
    "wide window": {"is_causal": True, "window_left": 10_000},
}


def spec_of(scale=None, softcap=None, **window) -> AttentionSpec:
    return AttentionSpec(scale, MaskSpec.from_window(**window), softcap)


def check(query, key, value, options, lse_grad=True, grad_out=None):
    out, lse = attn(query, key, value, **options)
    assert out.dtype == query.dtype
    assert lse.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32)
    grad_out = torch.randn_like(out) if grad_out is None else grad_out
    grad_lse = torch.randn_like(lse) if lse_grad else None
    grads = attn_backward(grad_out, grad_lse, query, key, value, out, lse, **options)
    spec = spec_of(**options)
    assert_close_to_reference((out, lse, *grads), query, key, value, spec, grad_out=grad_out, grad_lse=grad_lse)
    return out, lse, grads


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request, monkeypatch):
    if request.param == "many blocks":
        monkeypatch.setattr(cpu_problem, "SHORT", 0)
        monkeypatch.setattr(cpu_problem, "BLOCK", 4)
        monkeypatch.setattr(cpu_problem, "TILE_ELEMENTS", 300)  # splits the batch, then the heads


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lse_grad", [True, False], ids=["lse grad", "no lse grad"])
def test_options(options, lse_grad, blocks):
    check(*make_inputs(heads=4, kv_heads=2, q_len=21, kv_len=18), options, lse_grad)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0), (1, 1), (1, 9), (9, 1), (17, 33), (33, 17)])
@pytest.mark.parametrize("name", ["full", "causal", "bottom-right", "last rows blind", "everything"])
def test_lengths(lengths, name, blocks):
    query, key, value = make_inputs(q_len=lengths[0], kv_len=lengths[1], head_dim=8, v_head_dim=8, kv_heads=1)
    out, lse, grads = check(query, key, value, OPTIONS[name], lse_grad=False)
    if lengths[1] == 0:
        assert torch.equal(out, torch.zeros_like(out))
        assert (lse == -torch.inf).all()
        assert not grads[0].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["causal", "everything"])
@pytest.mark.parametrize("lse_grad", [True, False])
def test_layouts(layout, name, lse_grad):
    """ATen's CPU flash attention reads garbage from a last dim that is strided: the last layout here is the test."""
    check(*make_inputs(layout, kv_heads=2), OPTIONS[name], lse_grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["causal", "window", "everything"])
@pytest.mark.parametrize("dims", [(16, 16), (24, 40)])
def test_dtypes(dtype, name, dims):
    inputs = make_inputs(q_len=40, head_dim=dims[0], v_head_dim=dims[1], dtype=dtype)
    check(*inputs, OPTIONS[name], lse_grad=False)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_grouped_heads(kv_heads, blocks):
    check(*make_inputs("bnhd", heads=6, kv_heads=kv_heads), OPTIONS["window"])


@pytest.mark.parametrize("name", ["causal", "everything"])
def test_long(name):
    """Longer than one block at the real block size."""
    check(*make_inputs(batch=1, heads=2, kv_heads=1, q_len=700, kv_len=650), OPTIONS[name], lse_grad=False)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("name", ["causal", "window"])
def test_expanded_grad_out(layout, name):
    """``out.sum().backward()`` gives a gradient whose strides are all 0."""
    query, key, value = make_inputs(layout)
    grad_out = torch.ones(()).expand_as(query)
    assert set(grad_out.stride()) == {0}
    check(query, key, value, OPTIONS[name], lse_grad=False, grad_out=grad_out)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["query", "key", "value", "grad_out", "grad_lse"])
@pytest.mark.parametrize("name", ["causal", "both sides", "everything"])
def test_non_finite_values_reach_only_the_pairs_that_see_them(bad, where, name, blocks):
    query, key, value = make_inputs(heads=2, kv_heads=1, q_len=12, kv_len=12)
    grad_out, grad_lse = torch.randn_like(query), torch.randn(query.shape[:3])
    target = {"query": query, "key": key, "value": value, "grad_out": grad_out, "grad_lse": grad_lse}[where]
    target[0, 0, 7] = bad
    options, spec = OPTIONS[name], spec_of(**OPTIONS[name])
    out, lse = attn(query, key, value, **options)
    grads = attn_backward(grad_out, grad_lse, query, key, value, out, lse, **options)
    want = (*attention_forward(query, key, value, spec),)
    want += attention_backward(grad_out, grad_lse, query, key, value, spec)[:3]
    assert not all(x.isfinite().all() for x in want)
    for got, expected in zip((out, lse, *grads[:3]), want, strict=True):
        finite = expected.isfinite()
        assert torch.equal(got.isfinite(), finite)
        assert torch.allclose(got[finite].double(), expected[finite], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 5, 12, 17, 31, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_of_nan_stays_nan(dtype, length, causal):
    """ATen's kernels make 0 of it where there are fewer keys than a vector register holds."""
    query, key, value = make_inputs(heads=2, q_len=length, dtype=dtype)
    query[0, 0, length // 2] = torch.nan
    key[0, 1] = torch.nan
    out, lse = attn(query, key, value, is_causal=causal)
    rows = torch.zeros(lse.shape, dtype=torch.bool)
    rows[0, 0, length // 2] = rows[0, 1] = True
    assert torch.equal(lse.isnan(), rows)
    assert torch.equal(out.isnan(), rows.unsqueeze(-1).expand_as(out))


def test_a_masked_value_may_be_infinite_on_the_aten_route():
    """Causal without anything else goes to ATen, which multiplies 0 by the infinite value."""
    query, key, value = make_inputs(q_len=64)
    value[:, :, -1] = torch.inf
    out, _ = attn(query, key, value, is_causal=True)
    assert out[:, :, :-1].isfinite().all()
    assert (out[:, :, -1] == torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_16_bit_inputs_are_computed_in_float32(dtype):
    """Scaling the query before widening it rounds every score: invisible in out, not in lse."""
    inputs = make_inputs(q_len=40, head_dim=24, dtype=dtype)
    lse = attn(*inputs, softcap=1e3, scale=0.3)[1]
    want = attention_forward(*inputs, AttentionSpec(scale=0.3, softcap=1e3))[1]
    assert (lse - want).abs().max() < 1e-5


def test_memory_and_work_follow_the_window():
    """No call sees more scores than a block of rows times its band."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.bmm.default:
                largest = max(largest, result.numel())
            return result

    query, key, value = make_inputs(batch=1, heads=1, q_len=4096, head_dim=8)
    with Watch():
        out, lse = cpu.forward(
            query, key, value, scale=None, is_causal=True, window_left=64, window_right=None, diagonal=0, softcap=None
        )
        cpu.backward(
            torch.ones_like(out), None, query, key, value, out, lse, scale=None, is_causal=True, window_left=64,
            window_right=None, diagonal=0, softcap=None, grad_mask=[True, True, True, False, False],
        )  # fmt: skip
    assert 0 < largest <= cpu_problem.BLOCK * (cpu_problem.BLOCK + 64)


def test_only_needed_gradients_are_computed():
    query, key, value = make_inputs()
    out, lse = attn(query, key, value)
    full = attn_backward(torch.ones_like(out), None, query, key, value, out, lse)
    for i in range(8):
        mask = [bool(i & 1), bool(i & 2), bool(i & 4), False, False]
        grads = attn_backward(torch.ones_like(out), None, query, key, value, out, lse, grad_mask=mask)
        for grad, want, asked in zip(grads, full, mask, strict=True):
            assert torch.allclose(grad, want, atol=1e-6) if asked else grad.shape == (0,)
