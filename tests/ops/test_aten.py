"""ATen's argument lists, with the CPU's flash attention behind names that need a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_inductor.ops import aten
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.testing import assert_close_to_reference, make_inputs


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def bound(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        names = [a.name for a in op._schema.arguments]
        assert len(args) <= len(names)
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def forward(op: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            a = bound(op, args, kwargs)
            assert a["dropout_p"] == 0 and not a["return_debug_mask"] and a.get("attn_bias") is None
            out, lse = calls(a["query"], a["key"], a["value"], 0.0, a["is_causal"], scale=a["scale"])
            if "cudnn" in op._schema.name:
                assert a["compute_log_sumexp"]
                lse = lse.unsqueeze(-1)
            return (out, lse, *[None] * (len(op._schema.returns) - 2))

        return run

    def backward(op: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            a = bound(op, args, kwargs)
            assert set(a) == {x.name for x in op._schema.arguments}
            assert a["cum_seq_q"] is None and a["cum_seq_k"] is None and a["dropout_p"] == 0
            assert (a["max_q"], a["max_k"]) == (a["query"].shape[2], a["key"].shape[2])
            lse = a["logsumexp"]
            if "cudnn" in op._schema.name:
                assert a["attn_bias"] is None and math.copysign(1, a["dropout_p"]) == -1  # a plan of its own
                assert a["grad_out"].stride() == a["out"].stride() == torch.empty_like(a["query"]).stride()
                lse = lse.squeeze(-1)
            return grads(
                a["grad_out"], a["query"], a["key"], a["value"], a["out"], lse, 0.0, a["is_causal"], scale=a["scale"]
            )

        return run

    for name, fake in (
        ("flash_attention", forward),
        ("cudnn_attention", forward),
        ("flash_attention_backward", backward),
        ("cudnn_attention_backward", backward),
    ):
        packet = getattr(torch.ops.aten, f"_scaled_dot_product_{name}")
        monkeypatch.setattr(packet, "default", fake(packet.default))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backward", ["flash", "cudnn"])
@pytest.mark.parametrize("forward", ["flash", "cudnn"])
def test_pairs(forward: str, backward: str, causal: bool) -> None:
    inputs = make_inputs("bnhd", q_len=70)
    out, lse = aten.FORWARD[forward](*inputs, is_causal=causal, scale=0.2)
    grad_out = torch.randn_like(out, memory_format=torch.contiguous_format)
    grads = aten.BACKWARD[backward](grad_out, *inputs, out, lse, is_causal=causal, scale=0.2)
    spec = AttentionSpec(0.2, MaskSpec(None, 0 if causal else None))
    assert lse.shape == out.shape[:3]
    assert_close_to_reference([out, lse, *grads], *inputs, spec, grad_out=grad_out)
