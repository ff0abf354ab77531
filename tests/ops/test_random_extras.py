"""Random combinations of optional tensors, bands, lengths and layouts against float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from flash_inductor.ops import attn, attn_backward, block_ranges, cpu_problem
from flash_inductor.reference import attention_backward, attention_forward
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.testing import LAYOUTS, make_inputs


def random_call(seed: int) -> tuple[tuple[torch.Tensor, ...], dict[str, Any], dict[str, Any]]:
    """Inputs, optional tensors with the dropout, and the other options."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    kv_heads = r.choice([1, 2])
    sizes = {
        "batch": r.choice([1, 2, 3]), "heads": kv_heads * r.choice([1, 2]), "q_len": r.choice([0, 1, 2, 7, 33]),
        "kv_len": r.choice([0, 1, 5, 8, 35]),
    }  # fmt: skip
    layout = r.choice([name for name in LAYOUTS if name != "packed"])
    inputs = make_inputs(layout, **sizes, kv_heads=kv_heads, head_dim=4, dtype=torch.float64, seed=seed)
    full = tuple(sizes.values())

    def broadcast() -> list[int]:
        return [r.choice([1, n]) for n in full]

    extras: dict[str, Any] = {}
    if r.random() < 0.5:
        bias = torch.randn(broadcast(), dtype=r.choice([torch.float64, torch.float32, torch.float16]))
        extras["bias"] = bias.expand(
            *[r.choice([n, m]) if n == 1 else n for n, m in zip(bias.shape, full, strict=True)]
        )
        if r.random() < 0.3:
            extras["bias"] = extras["bias"].masked_fill(torch.rand(extras["bias"].shape) < 0.4, -torch.inf)
    if r.random() < 0.5:
        extras["mask"] = torch.rand(broadcast() if r.random() < 0.6 else (full[0], 1, 1, full[3])) < r.random()
    if r.random() < 0.4:
        for name, length in (("query_segments", full[2]), ("key_segments", full[3])):
            ids = torch.randint(0, 4, (r.choice([1, full[0]]), length), dtype=torch.int32)
            extras[name] = ids.sort().values if r.random() < 0.7 else ids
    if r.random() < 0.4:
        extras["sinks"] = torch.randn(full[1], dtype=r.choice([torch.float64, torch.float32]))
    if r.random() < 0.4:
        extras["dropout_p"] = r.choice([0.1, 0.5, 0.9])
        extras["rng_state"] = torch.randint(-(2**63), 2**63 - 1, (2,))
    options: dict[str, Any] = {
        "is_causal": r.random() < 0.4, "window_left": r.choice([None, None, 0, 6]),
        "window_right": r.choice([None, None, 3]), "diagonal": r.choice([0, 0, 2, -3]),
        "softcap": r.choice([None, None, 1.5]), "scale": r.choice([None, None, 0.7, -0.4]),
    }  # fmt: skip
    return inputs, extras, options


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_random_calls(start, monkeypatch):
    for seed in range(start, start + 50):
        inputs, extras, options = random_call(seed)
        if seed % 2:
            monkeypatch.setattr(cpu_problem, "SHORT", 0)
            monkeypatch.setattr(cpu_problem, "BLOCK", 4)
            monkeypatch.setattr(cpu_problem, "TILE_ELEMENTS", 150)
        else:
            monkeypatch.undo()
        hints: dict[str, Any] = {}
        if seed % 3 == 0 and ("mask" in extras or "query_segments" in extras):
            given = [extras.get(name) for name in ("mask", "query_segments", "key_segments")]
            hints["key_range"], hints["query_range"] = block_ranges(*given, inputs[0].shape[2], inputs[1].shape[2])
        out, lse = attn(*inputs, **extras, **hints, **options)
        grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse) if seed % 5 else None
        asked = [True, True, True, "bias" in extras, "sinks" in extras]
        grads = attn_backward(grad_out, grad_lse, *inputs, out, lse, **extras, **hints, **options, grad_mask=asked)
        window = {k: options[k] for k in ("is_causal", "window_left", "window_right", "diagonal")}
        spec = AttentionSpec(options["scale"], MaskSpec.from_window(**window), options["softcap"])
        want = [*attention_forward(*inputs, spec, **extras)]
        want += attention_backward(grad_out, grad_lse, *inputs, spec, **extras)
        for i, (got, expected) in enumerate(zip((out, lse, *grads), want, strict=True)):
            if expected is None:
                assert got.shape == (0,)
                continue
            tolerance = 1e-9 if got.dtype == torch.float64 else 2 * torch.finfo(got.dtype).eps
            torch.testing.assert_close(
                got.double(), expected, atol=tolerance, rtol=tolerance,
                msg=lambda text, seed=seed, i=i: f"seed {seed}, result {i}: {text}",
            )  # fmt: skip
