"""The eager kernels on a CUDA device, against float64 at the sizes of a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_inductor.ops import cuda
from flash_inductor.reference import attention_backward
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.testing import assert_close_to_reference, make_inputs

pytestmark = pytest.mark.gpu

_CAUSAL: dict[str, Any] = {"is_causal": True}
_SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], float | None]] = {
    # name: (sizes, mask arguments, softcap)
    "causal": ({"q_len": 512}, _CAUSAL, None),
    "full_ragged": ({"q_len": 333, "kv_len": 519}, {}, None),
    "one_query": ({"q_len": 1, "kv_len": 777}, {"is_causal": True, "diagonal": 776}, None),
    "window": ({"q_len": 600}, {"is_causal": True, "window_left": 100}, None),
    "window_both": ({"q_len": 600, "kv_len": 500}, {"window_left": 90, "window_right": 70, "diagonal": 9}, None),
    "blind_rows": ({"q_len": 600, "kv_len": 100}, {"window_left": 5, "window_right": 5, "diagonal": -40}, None),
    "gqa": ({"q_len": 400, "heads": 8, "kv_heads": 2}, _CAUSAL, None),
    "softcap": ({"q_len": 400, "heads": 4, "kv_heads": 2}, _CAUSAL, 20.0),
    "gemma2": ({"q_len": 500, "heads": 4, "kv_heads": 2, "head_dim": 256}, {**_CAUSAL, "window_left": 128}, 50.0),
    **{f"dim_{d}": ({"q_len": 300, "head_dim": d}, _CAUSAL, None) for d in (8, 40, 72, 96, 128, 160, 192, 256)},
    "mla": ({"q_len": 300, "head_dim": 192, "v_head_dim": 128}, _CAUSAL, None),
}


_FP16 = ("causal", "window_both", "softcap", "gemma2", "dim_96", "dim_128")  # runs the code of bfloat16


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in _SHAPES for dtype in (torch.bfloat16, torch.float32)),
        *((name, torch.float16) for name in _FP16),
    ],
    ids=str,
)
def test_matches_float64(name: str, dtype: torch.dtype) -> None:
    sizes, mask, softcap = _SHAPES[name]
    inputs = make_inputs(**{"batch": 2, "heads": 2, "head_dim": 64, **sizes}, dtype=dtype, device="cuda")
    spec = AttentionSpec(None, MaskSpec.from_window(**mask), softcap)
    out, lse = cuda.forward(*inputs, softcap=softcap, **mask)
    grad_out = torch.randn_like(out)
    grad_lse = torch.randn_like(lse)
    grads = cuda.backward(grad_out, grad_lse, *inputs, out, lse, softcap=softcap, **mask)
    assert_close_to_reference([out, lse, *grads], *inputs, spec, grad_out=grad_out, grad_lse=grad_lse)


@pytest.mark.parametrize("layout", ["bnhd", "nbhd", "packed", "expanded", "sliced", "strided"])
def test_layouts(layout: str) -> None:
    inputs = make_inputs(layout, q_len=200, head_dim=64, dtype=torch.bfloat16, device="cuda")
    out, lse = cuda.forward(*inputs, is_causal=True)
    grad_out = torch.ones((), dtype=out.dtype, device="cuda").expand_as(out)
    grads = cuda.backward(grad_out, None, *inputs, out, lse, is_causal=True)
    spec = AttentionSpec(None, MaskSpec(upper=0))
    assert_close_to_reference([out, lse, *grads], *inputs, spec, grad_out=grad_out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_repeats_bit_for_bit(dtype: torch.dtype) -> None:
    inputs = make_inputs(q_len=1000, heads=8, kv_heads=2, head_dim=64, dtype=dtype, device="cuda")
    out, lse = cuda.forward(*inputs, is_causal=True)
    grad_out = torch.randn_like(out)
    first = cuda.backward(grad_out, None, *inputs, out, lse, is_causal=True)
    for _ in range(5):
        again = cuda.forward(*inputs, is_causal=True)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)
        for a, b in zip(cuda.backward(grad_out, None, *inputs, out, lse, is_causal=True), first, strict=True):
            assert torch.equal(a, b)


def test_what_nobody_sees_does_not_leak() -> None:
    query, key, value = make_inputs(q_len=300, kv_len=700, head_dim=64, dtype=torch.bfloat16, device="cuda")
    key[:, :, 300:] = torch.nan
    value[:, :, 300:] = torch.inf
    out, lse = cuda.forward(query, key, value, is_causal=True)
    grad_out = torch.randn_like(out)
    grads = cuda.backward(grad_out, None, query, key, value, out, lse, is_causal=True)
    assert_close_to_reference(
        [out, lse, *grads], query, key, value, AttentionSpec(None, MaskSpec(upper=0)), grad_out=grad_out
    )
    assert not grads[1][:, :, 300:].any() and not grads[2][:, :, 300:].any()


@pytest.mark.parametrize("layout", ["heads", "rows"])
def test_offsets_beyond_32_bits(layout: str) -> None:
    """Views whose last head or last rows start more than 2**31 elements into the storage (4.3 GiB of bfloat16)."""
    length, dim, stride = 256, 64, (1 << 31) + 4096
    storage = torch.zeros(stride + 65_536 * 2, dtype=torch.bfloat16, device="cuda")
    if layout == "heads":
        x = storage.as_strided((1, 2, length, dim), (0, stride, dim, 1))
    else:
        row = (stride // (length - 1)) // 8 * 8 + 8
        x = storage.as_strided((1, 1, length, dim), (0, 0, row, 1))
    small = torch.randn(x.shape, device="cuda", dtype=torch.bfloat16)
    x.copy_(small)
    assert_same = torch.testing.assert_close
    out, lse = cuda.forward(x, x, x, is_causal=True)
    want, want_lse = cuda.forward(small, small, small, is_causal=True)
    assert_same(out, want, rtol=0, atol=0)
    assert_same(lse, want_lse, rtol=0, atol=0)
    grad_out = torch.randn_like(small)
    grads = cuda.backward(grad_out, None, x, x, x, out, lse, is_causal=True)
    for got, expected in zip(grads, cuda.backward(grad_out, None, *[small] * 3, want, want_lse, is_causal=True)):  # noqa: B905
        assert_same(got, expected, rtol=0, atol=0)


def test_more_heads_than_a_grid_axis_holds() -> None:
    """batch * heads above 65535, the limit of the second and third axis of a grid."""
    query, key, value = (torch.randn(70_000, 1, 3, 16, device="cuda", dtype=torch.float16) for _ in range(3))
    out, lse = cuda.forward(query, key, value)
    grad_out = torch.randn_like(out)
    grads = cuda.backward(grad_out, None, query, key, value, out, lse)
    last = [x[-50:] for x in (query, key, value)]
    expected = attention_backward(grad_out[-50:], None, last[0], last[1], last[2])
    for got, want in zip(grads[:3], expected[:3], strict=True):
        torch.testing.assert_close(got[-50:].double(), want, rtol=1e-2, atol=2e-3)


def test_fp32_precision_follows_torch() -> None:
    inputs = make_inputs(q_len=300, head_dim=64, dtype=torch.float32, device="cuda")
    before = torch.get_float32_matmul_precision()
    results = {}
    try:
        for setting in ("highest", "high"):
            torch.set_float32_matmul_precision(setting)
            results[setting] = cuda.forward(*inputs)[0]
    finally:
        torch.set_float32_matmul_precision(before)
    wide = [x.double() for x in inputs]
    want = torch.softmax(wide[0] @ wide[1].mT / 8, -1) @ wide[2]
    errors = {k: (v - want).abs().max().item() for k, v in results.items()}
    assert errors["highest"] < 1e-5 < errors["high"] < 1e-2, errors
