"""The Hopper backward for head dims above 128 on an H100 or its like, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_inductor.ops import hopper
from flash_inductor.ops.layout import empty_like_layout
from flash_inductor.reference import attention_forward
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.testing import assert_close_to_reference, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

_FEATURES: dict[str, tuple[dict[str, Any], MaskSpec, float | None]] = {
    # name: (sizes, band, softcap)
    "full": ({"q_len": 512}, MaskSpec(), None),
    "full_ragged": ({"q_len": 333, "kv_len": 519}, MaskSpec(), None),
    "causal": ({"q_len": 1000, "heads": 6, "kv_heads": 2}, MaskSpec(upper=0), None),
    "bottom_right": ({"q_len": 300, "kv_len": 777}, MaskSpec(upper=477), None),
    "more_queries": ({"q_len": 700, "kv_len": 200}, MaskSpec(upper=-500), None),
    "one_query": ({"q_len": 1, "kv_len": 777}, MaskSpec(upper=776), None),
    "one_key": ({"q_len": 300, "kv_len": 1}, MaskSpec(), None),
    "window_both": ({"q_len": 600, "kv_len": 500}, MaskSpec(-64, 64), None),
    "window_bottom_right": ({"q_len": 300, "kv_len": 900}, MaskSpec(500, 600), None),
    "left_only": ({"q_len": 500, "kv_len": 600}, MaskSpec(lower=-100), None),
    "blind_rows": ({"q_len": 600, "kv_len": 100}, MaskSpec(-45, -35), None),
    "all_blind": ({"q_len": 100, "kv_len": 100}, MaskSpec(100, 120), None),
    "softcap": ({"q_len": 700, "heads": 4, "kv_heads": 2}, MaskSpec(upper=0), 2.0),
    "gemma2": ({"q_len": 900, "heads": 4, "kv_heads": 2}, MaskSpec(-300, 0), 50.0),
}


_Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # query, key, value, out, lse, grad_out


def _inputs(layout: str, spec: AttentionSpec, **sizes: Any) -> _Inputs:
    inputs = make_inputs(layout, **{"heads": 2, "head_dim": 256, "dtype": torch.bfloat16, **sizes}, device="cuda")
    exact, lse = attention_forward(*inputs, spec)
    out = empty_like_layout(inputs[0], exact.shape)
    out.copy_(exact)
    return (*inputs, out, lse.float(), torch.randn_like(out))


def _run(inputs: _Inputs, grad_lse: Tensor | None, spec: AttentionSpec, deterministic: bool) -> list[Tensor]:
    from flash_inductor.ops import hopper_backward

    query, key, value, out, lse, grad_out = inputs
    grads = [empty_like_layout(x, x.shape).fill_(torch.nan) for x in (query, key, value)]
    assert hopper.aligned(query, key, value, out, grad_out, *grads)
    launches = hopper_backward.backward(
        grad_out, grad_lse, query, key, value, out, lse, grads[0], grads[1], grads[2],
        scale=query.shape[3] ** -0.5, mask=spec.mask, softcap=spec.softcap, deterministic=deterministic,
    )  # fmt: skip
    for launch in launches:
        launch()
    return grads


def _check(layout: str, spec: AttentionSpec, *, deterministic: bool = False, **sizes: Any) -> None:
    inputs = _inputs(layout, spec, **sizes)
    grad_lse = torch.randn_like(inputs[4]) if deterministic else None
    grads = _run(inputs, grad_lse, spec, deterministic)
    assert_close_to_reference([None, None, *grads], *inputs[:3], spec, grad_out=inputs[5], grad_lse=grad_lse)


@pytest.mark.parametrize("deterministic", [False, True], ids=["free", "deterministic"])
@pytest.mark.parametrize("feature", _FEATURES)
def test_features(feature: str, deterministic: bool) -> None:
    sizes, mask, softcap = _FEATURES[feature]
    _check("bnhd", AttentionSpec(None, mask, softcap), deterministic=deterministic, **sizes)


@pytest.mark.parametrize("dims", [(136, 136), (160, 160), (192, 192), (192, 128), (64, 256), (224, 72)], ids=str)
@pytest.mark.parametrize("feature", ["causal", "full_ragged"])
def test_head_dims(feature: str, dims: tuple[int, int]) -> None:
    sizes, mask, softcap = _FEATURES[feature]
    _check("bnhd", AttentionSpec(None, mask, softcap), **sizes, head_dim=dims[0], v_head_dim=dims[1])


@pytest.mark.parametrize("feature", ["full", "causal", "softcap", "window_both"])
def test_fp16(feature: str) -> None:
    sizes, mask, softcap = _FEATURES[feature]
    _check("bhnd", AttentionSpec(None, mask, softcap), **sizes, dtype=torch.float16)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "nbhd", "packed", "sliced"])
def test_layouts(layout: str) -> None:
    _check(layout, AttentionSpec(None, MaskSpec(upper=0)), q_len=200)


def test_repeats_bit_for_bit() -> None:
    for mask in (MaskSpec(upper=0), MaskSpec(-500, 0), MaskSpec()):
        spec = AttentionSpec(None, mask, 50.0)
        inputs = _inputs("bnhd", spec, q_len=2000, heads=8, kv_heads=4)
        for deterministic in (True, False):
            grads = _run(inputs, None, spec, deterministic)
            for _ in range(20):
                again = _run(inputs, None, spec, deterministic)
                for x, y in list(zip(grads, again, strict=True))[0 if deterministic else 1 :]:
                    assert torch.equal(x, y)


def test_what_nobody_sees_does_not_leak() -> None:
    spec = AttentionSpec(None, MaskSpec(100, 220))
    inputs = _inputs("bnhd", spec, q_len=300, kv_len=900)
    query, key, value = inputs[:3]
    for unseen in (slice(520, None), slice(None, 100)):
        key[:, :, unseen], value[:, :, unseen] = torch.nan, torch.inf
    grads = _run(inputs, None, spec, False)
    assert_close_to_reference([None, None, *grads], query, key, value, spec, grad_out=inputs[5])
    assert not grads[1][:, :, :100].any() and not grads[2][:, :, 520:].any()
