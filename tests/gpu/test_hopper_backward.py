"""The Hopper backward on an H100 or H200, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_inductor.reference import attention_backward, attention_forward
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.testing import assert_close_to_reference, largest_block_error, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

_CAUSAL = MaskSpec(upper=0)
_CASES: dict[str, tuple[dict[str, Any], MaskSpec, float | None]] = {
    # name: (sizes, band, softcap)
    **{f"causal_{d}": ({"q_len": 700, "heads": 4, "kv_heads": 2, "head_dim": d}, _CAUSAL, None)
       for d in (8, 32, 40, 64, 72, 80, 96, 104, 128)},
    **{f"full_ragged_{d}": ({"q_len": 333, "kv_len": 519, "head_dim": d}, MaskSpec(), None) for d in (64, 96, 128)},
    **{f"window_{d}": ({"q_len": 1000, "heads": 8, "kv_heads": 1, "head_dim": d}, MaskSpec(-300, 0), None)
       for d in (64, 128)},
    **{f"both_sides_{d}": ({"q_len": 600, "kv_len": 500, "head_dim": d}, MaskSpec(-64, 64), None) for d in (64, 128)},
    **{f"softcap_{d}": ({"q_len": 700, "heads": 4, "kv_heads": 2, "head_dim": d}, _CAUSAL, 20.0) for d in (64, 128)},
    "one_query": ({"q_len": 1, "kv_len": 777}, MaskSpec(upper=776), None),
    "one_key": ({"q_len": 300, "kv_len": 1}, MaskSpec(), None),
    "left_only": ({"q_len": 500, "kv_len": 600}, MaskSpec(lower=-100), None),
    "bottom_right": ({"q_len": 300, "kv_len": 777}, MaskSpec(upper=477), None),
    "blind_rows": ({"q_len": 600, "kv_len": 100}, MaskSpec(-45, -35), None),
    "unseen_keys": ({"q_len": 300, "kv_len": 700}, MaskSpec(10, 50), None),
    "nothing": ({"q_len": 100, "kv_len": 100}, MaskSpec(5, 4), None),
}  # fmt: skip


def _inputs(layout: str = "bhnd", **sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    return make_inputs(layout, **{"batch": 2, "heads": 2, "head_dim": 64, **sizes}, device="cuda")


def _backward(
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: MaskSpec = _CAUSAL,
    softcap: float | None = None,
    deterministic: bool = False,
    config: Any = None,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """grad_query, grad_key, grad_value; grad_out, grad_lse."""
    from flash_inductor.ops import hopper_backward

    query, key, value = inputs
    out, lse = attention_forward(query, key, value, AttentionSpec(None, mask, softcap))
    generator = torch.Generator().manual_seed(7)
    batch, heads, q_len, dim = out.shape
    grad_out = torch.randn(batch, q_len, heads, dim, generator=generator).to("cuda", query.dtype).transpose(1, 2)
    grad_lse = torch.randn(batch, heads, q_len, generator=generator).cuda()
    grads = [torch.full_like(x, torch.nan) for x in inputs]
    launches = hopper_backward.backward(
        grad_out, grad_lse, query, key, value, out.to(query.dtype), lse.float(), grads[0], grads[1], grads[2],
        scale=dim**-0.5, mask=mask, softcap=softcap, deterministic=deterministic, config=config,
    )  # fmt: skip
    for launch in launches:
        launch()
    return grads, grad_out, grad_lse


def _check(
    grads: list[Tensor], inputs: tuple[Tensor, Tensor, Tensor], spec: AttentionSpec, grad_out: Tensor, grad_lse: Tensor
) -> None:
    assert_close_to_reference([None, None, *grads], *inputs, spec, grad_out=grad_out, grad_lse=grad_lse)
    for got, want in zip(grads, attention_backward(grad_out, grad_lse, *inputs, spec), strict=False):
        assert want is not None
        assert largest_block_error(got, want) < 0.02


_FP16 = ("causal_64", "causal_128", "full_ragged_96", "window_64", "both_sides_128", "softcap_64", "softcap_128")


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "in_turn"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in _CASES), *((name, torch.float16) for name in _FP16)],
    ids=str,
)
def test_matches_float64(name: str, dtype: torch.dtype, deterministic: bool) -> None:
    sizes, mask, softcap = _CASES[name]
    inputs = _inputs(**sizes, dtype=dtype)
    grads, grad_out, grad_lse = _backward(inputs, mask, softcap, deterministic)
    spec = AttentionSpec(None, mask, softcap)
    _check(grads, inputs, spec, grad_out, grad_lse)
    i = torch.arange(inputs[0].shape[2], device="cuda")[:, None]
    j = torch.arange(inputs[1].shape[2], device="cuda")[None]
    seen = (j - i >= (-(1 << 20) if mask.lower is None else mask.lower)) & (
        j - i <= ((1 << 20) if mask.upper is None else mask.upper)
    )
    assert not grads[0][:, :, ~seen.any(1)].any()
    assert not grads[1][:, :, ~seen.any(0)].any() and not grads[2][:, :, ~seen.any(0)].any()


@pytest.mark.parametrize("layout", ["bnhd", "nbhd", "packed", "sliced"])
def test_layouts(layout: str) -> None:
    inputs = _inputs(layout, q_len=200, dtype=torch.bfloat16)
    grads, grad_out, grad_lse = _backward(inputs)
    spec = AttentionSpec(None, _CAUSAL)
    _check(grads, inputs, spec, grad_out, grad_lse)


@pytest.mark.parametrize("mask", [MaskSpec(), _CAUSAL, MaskSpec(-150, 20)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "in_turn"])
@pytest.mark.parametrize(("head_dim", "stages", "ahead"), [(64, 3, True), (64, 6, False), (128, 2, False)])
def test_configs(head_dim: int, stages: int, ahead: bool, deterministic: bool, mask: MaskSpec) -> None:
    from flash_inductor.ops import hopper_backward

    config = replace(hopper_backward._CONFIGS[head_dim, 0], stages=stages, ahead=ahead, heads_at_once=3)
    inputs = _inputs(q_len=700, heads=4, kv_heads=2, head_dim=head_dim, dtype=torch.bfloat16)
    grads, grad_out, grad_lse = _backward(inputs, mask, deterministic=deterministic, config=config)
    spec = AttentionSpec(None, mask)
    _check(grads, inputs, spec, grad_out, grad_lse)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", [MaskSpec(), _CAUSAL, MaskSpec(-200, 30)], ids=["full", "causal", "window"])
def test_repeats_bit_for_bit(head_dim: int, mask: MaskSpec) -> None:
    inputs = _inputs(q_len=2000, heads=32, kv_heads=8, head_dim=head_dim, dtype=torch.bfloat16)
    first, _, _ = _backward(inputs, mask, deterministic=True)
    free, _, _ = _backward(inputs, mask)
    for got, want in zip(free, first, strict=True):  # in turns, blocks of queries come from the last to the first
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)
    again, _, _ = _backward(inputs, mask)
    assert torch.equal(free[1], again[1]) and torch.equal(free[2], again[2])  # only dQ's sums are in no fixed order
    for _ in range(100):
        again, _, _ = _backward(inputs, mask, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_what_nobody_sees_does_not_leak() -> None:
    query, key, value = _inputs(q_len=300, kv_len=700, dtype=torch.bfloat16)
    expected, _, _ = _backward((query, key, value), deterministic=True)
    key, value = key.clone(), value.clone()
    key[:, :, 300:] = torch.nan
    value[:, :, 300:] = torch.inf
    grads, _, _ = _backward((query, key, value), deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    assert not grads[1][:, :, 300:].any() and not grads[2][:, :, 300:].any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_offsets_beyond_32_bits(deterministic: bool) -> None:
    """Heads that start more than 2**31 elements into the storage."""
    length, dim, stride = 256, 64, (1 << 31) + 4096
    storage = torch.zeros(stride + length * dim, dtype=torch.bfloat16, device="cuda")
    x = storage.as_strided((1, 2, length, dim), (0, stride, dim, 1))
    small = torch.randn(x.shape, device="cuda", dtype=torch.bfloat16)
    x.copy_(small)
    expected, _, _ = _backward((small, small, small), deterministic=True)
    grads, _, _ = _backward((x, x, x), deterministic=deterministic)
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)


def test_many_heads() -> None:
    """More than 65535, the limit of the second axis of a grid."""
    inputs = _inputs(batch=2, heads=40_000, q_len=3, head_dim=8, dtype=torch.bfloat16)
    grads, grad_out, grad_lse = _backward(inputs, deterministic=True)
    last = [x[1:, -50:].contiguous() for x in (*inputs, grad_out, grad_lse, *grads)]
    assert_close_to_reference(
        [None, None, *last[5:]], last[0], last[1], last[2], AttentionSpec(None, _CAUSAL),
        grad_out=last[3], grad_lse=last[4],
    )  # fmt: skip
