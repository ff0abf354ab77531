"""The user function: its options are those of the op, in its own words."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flash_inductor.functional import attention
from flash_inductor.reference import attention_forward, visible
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.testing import assert_close_to_reference, make_inputs

Q_LEN, KV_LEN = 9, 13


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({}, MaskSpec()),
        ({"is_causal": True}, MaskSpec(None, 0)),
        ({"window_size": 2}, MaskSpec(-2, 2)),
        ({"window_size": 2, "is_causal": True}, MaskSpec(-2, 0)),
        ({"window_size": (3, None)}, MaskSpec(-3, None)),
        ({"window_size": (None, 1)}, MaskSpec(None, 1)),
        ({"window_size": (0, 0), "diagonal": "bottom_right"}, MaskSpec(4, 4)),
        ({"is_causal": True, "diagonal": "bottom_right"}, MaskSpec(None, 4)),
        ({"is_causal": True, "diagonal": -2}, MaskSpec(None, -2)),
    ],
)
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0, "scale": 0.3}])
def test_options(options, mask, extra):
    inputs = make_inputs(kv_heads=2, q_len=Q_LEN, kv_len=KV_LEN)
    out, lse = attention(*inputs, **options, **extra, return_lse=True)
    assert_close_to_reference((out, lse), *inputs, AttentionSpec(mask=mask, **extra))
    assert torch.equal(attention(*inputs, **options, **extra), out)


@pytest.mark.parametrize("is_causal", [False, True])
def test_agrees_with_sdpa(is_causal):
    query, key, value = make_inputs(kv_heads=2, q_len=Q_LEN, kv_len=KV_LEN)
    want = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(attention(query, key, value, is_causal=is_causal), want)


def test_reference_agrees_with_sdpa_in_float64():
    query, key, value = make_inputs(q_len=Q_LEN, kv_len=KV_LEN, dtype=torch.float64)
    mask = visible(MaskSpec(-3, 2), Q_LEN, KV_LEN)
    want = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(attention_forward(query, key, value, AttentionSpec(mask=MaskSpec(-3, 2)))[0], want)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(dynamic):
    torch._dynamo.reset()
    function = torch.compile(
        lambda *x: attention(*x, is_causal=True, window_size=(4, 0), diagonal="bottom_right"),
        backend="aot_eager", fullgraph=True, dynamic=dynamic,
    )  # fmt: skip
    for lengths in ((5, 9), (20, 31)):
        inputs = make_inputs(q_len=lengths[0], kv_len=lengths[1])
        want = attention(*inputs, is_causal=True, window_size=(4, 0), diagonal="bottom_right")
        torch.testing.assert_close(function(*inputs), want)


def test_a_wrong_result_is_noticed():
    """The comparison helper itself: 1 % off, a shifted mask and a NaN all fail."""
    inputs = make_inputs(dtype=torch.bfloat16)
    out, lse = attention(*inputs, is_causal=True, return_lse=True)
    spec = AttentionSpec(mask=MaskSpec(None, 0))
    assert_close_to_reference((out, lse), *inputs, spec)
    for wrong in ((out * 1.05, lse), (out, lse + 1e-3), (out.where(out > -10, torch.nan), lse * torch.nan)):
        with pytest.raises(AssertionError):
            assert_close_to_reference(wrong, *inputs, spec)
    with pytest.raises(AssertionError, match="out: error"):
        assert_close_to_reference((out,), *inputs, AttentionSpec(mask=MaskSpec(None, 1)))
