"""Cases with bias, mask, segments, dropout, sinks and ranges, for the kernels on any device, against float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flash_inductor.reference import attention_backward, attention_forward
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.testing import make_inputs

# Errors relative to the largest value.  fp32: tens of roundings of fp32 sums.  16-bit: p and ds are rounded to the
# dtype before the second product (eps / 2 each, averaged down by the sum), the result once more.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@dataclass(frozen=True)
class Case:
    """One call of forward and backward.

    ``bias`` and ``mask`` name the dims that aren't 1 out of "bhmn".  ``padding`` is "left", "right" or "holes",
    ``segments`` the number of documents.
    """

    q_len: int = 40
    kv_len: int = 40
    batch: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    v_head_dim: int | None = None
    band: dict[str, Any] = field(default_factory=dict)
    scale: float | None = None
    softcap: float | None = None
    bias: str | None = None
    bias_dtype: torch.dtype = torch.float32
    bias_hides: float | None = None  # the value that hides a third of the pairs, all of them in row 3
    expanded: bool = False  # bias and mask have stride 0 in the dims they don't vary in
    mask: str | None = None
    padding: str | None = None
    poison: bool = False  # keys that padding hides are NaN and their values inf
    segments: int = 0
    sinks: bool = False
    dropout: float = 0.0
    grad_lse: bool = False
    dtype: torch.dtype = torch.float32

    def inputs(self, device: str = "cpu") -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Tensor]]:
        """Query, key and value, and the optional tensors by name."""
        qkv = make_inputs(
            "bnhd", batch=self.batch, heads=self.heads, kv_heads=self.kv_heads, q_len=self.q_len, kv_len=self.kv_len,
            head_dim=self.head_dim, v_head_dim=self.v_head_dim, dtype=self.dtype, device=device,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(7)
        full = (self.batch, self.heads, self.q_len, self.kv_len)
        given: dict[str, Tensor] = {}

        def pairs(dims: str) -> tuple[int, ...]:
            return tuple(size if name in dims else 1 for name, size in zip("bhmn", full, strict=True))

        if self.bias is not None:
            bias = torch.randn(pairs(self.bias), generator=generator)
            if self.bias_hides is not None:
                bias[torch.rand(bias.shape, generator=generator) < 0.3] = self.bias_hides
                bias[..., 0] = 0.5
                bias[:, :, 3] = self.bias_hides
            given["bias"] = bias.to(self.bias_dtype)
        if self.mask is not None:
            given["mask"] = torch.rand(pairs(self.mask), generator=generator) < 0.7
            if "m" in self.mask:
                given["mask"][:, :, 5 % self.q_len] = False
        if self.padding is not None:
            position = torch.arange(self.kv_len).expand(self.batch, -1)
            count = torch.arange(self.batch)[:, None] * (self.kv_len // self.batch) + 3
            visible = {
                "left": position >= self.kv_len - count,
                "right": position < count,
                "holes": torch.rand(self.batch, self.kv_len, generator=generator) < 0.5,
            }[self.padding]
            given["mask"] = visible[:, None, None]
            if self.poison:
                for x, number in zip(qkv[1:], (torch.nan, torch.inf), strict=True):
                    x.transpose(1, 2)[~visible.to(device)] = number
        if self.expanded:
            given |= {name: x.expand(full) for name, x in given.items()}
        if self.segments:
            for name, length in (("query_segments", self.q_len), ("key_segments", self.kv_len)):
                rows = torch.randint(self.segments, (self.batch, length), generator=generator, dtype=torch.int32)
                given[name] = rows.sort(-1).values
        if self.sinks:
            given["sinks"] = torch.randn(self.heads, generator=generator)
        if self.dropout:
            given["rng_state"] = torch.tensor([0x1234_5678_9ABC_DEF0, 0x1_0000_0007])
        return qkv, {name: x.to(device) for name, x in given.items()}

    def options(self) -> dict[str, Any]:
        """The op's keyword arguments that aren't tensors."""
        return {"scale": self.scale, "softcap": self.softcap, "dropout_p": self.dropout, **self.band}

    def reference(self, grad_out: Tensor, grad_lse: Tensor | None, qkv: Any, given: dict[str, Tensor]) -> list[Any]:
        """out, lse and the gradients of query, key, value and bias in float64."""
        spec = AttentionSpec(self.scale, MaskSpec.from_window(**self.band), self.softcap)
        extras = {**given, "dropout_p": self.dropout}
        out, lse = attention_forward(*qkv, spec, **extras)
        return [out, lse, *attention_backward(grad_out, grad_lse, *qkv, spec, **extras)[:4]]


_CAUSAL = {"is_causal": True}
CASES: dict[str, Case] = {
    # With grad_lse, because softmax doesn't see what is added to all of a row.
    **{f"bias_{dims or 'scalar'}": Case(bias=dims, grad_lse=True) for dims in ("bhmn", "hmn", "mn", "bm", "hn", "")},
    "bias_expanded": Case(bias="hmn", expanded=True, kv_len=50),
    "bias_causal_gqa": Case(heads=4, kv_heads=2, bias="hmn", band=_CAUSAL, bias_dtype=torch.bfloat16),
    "bias_softcap": Case(bias="hn", softcap=2.0, band={"window_left": 30, "window_right": 4}),
    "bias_negative_scale": Case(bias="mn", scale=-0.4),
    "bias_zero_scale": Case(bias="mn", scale=0.0),
    "bias_of_minus_inf": Case(bias="bmn", bias_hides=-torch.inf),
    "bias_of_the_lowest": Case(bias="bmn", bias_hides=torch.finfo(torch.bfloat16).min, band=_CAUSAL),
    "mask_bhmn": Case(mask="bhmn"),
    "mask_mn_causal": Case(mask="mn", band=_CAUSAL),
    "mask_bm": Case(mask="bm"),
    "mask_expanded": Case(mask="mn", expanded=True),
    "mask_and_bias": Case(mask="bmn", bias="hmn"),
    **{f"padding_{side}": Case(padding=side, kv_len=200) for side in ("left", "right", "holes")},
    "padding_poisoned": Case(padding="right", kv_len=150, poison=True),
    "padding_causal": Case(padding="left", q_len=150, kv_len=150, band=_CAUSAL),
    "padding_with_bias": Case(padding="right", kv_len=150, bias="hmn"),
    "segments": Case(segments=4, q_len=150, kv_len=150, band=_CAUSAL),
    "segments_cross": Case(segments=3, q_len=140, kv_len=200),
    "segments_window_padding": Case(segments=3, q_len=150, kv_len=150, heads=1, padding="right",
                                    band={"is_causal": True, "window_left": 20}),
    "sinks": Case(sinks=True, band={"is_causal": True, "window_left": 20}, grad_lse=True),
    "sinks_blind_rows": Case(sinks=True, band={"is_causal": True, "diagonal": -30}, grad_lse=True),
    "sinks_softcap_scale": Case(sinks=True, softcap=3.0, scale=-0.5),
    "sinks_negative_scale": Case(sinks=True, scale=-0.5),
    "sinks_bias_padding": Case(sinks=True, bias="hmn", padding="left"),
    "dropout": Case(dropout=0.3, band=_CAUSAL, grad_lse=True),
    "dropout_ragged": Case(dropout=0.5, q_len=33, kv_len=61),
    "dropout_bias_mask": Case(dropout=0.1, bias="hmn", padding="right", kv_len=70),
    "everything": Case(dropout=0.2, bias="bmn", mask="bhmn", segments=2, sinks=True, softcap=4.0, grad_lse=True,
                       band={"window_left": 40, "window_right": 9}),
    "bf16": Case(dropout=0.2, bias="hmn", bias_dtype=torch.bfloat16, dtype=torch.bfloat16, head_dim=32, band=_CAUSAL),
    "fp16": Case(segments=2, sinks=True, dtype=torch.float16, head_dim=24, v_head_dim=40, padding="left"),
}  # fmt: skip


def run(case: Case, device: str = "cpu", **configs: Any) -> None:
    """Raise AssertionError unless the kernels agree with the reference; ``configs`` by kind of kernel."""
    from flash_inductor.ops import cuda
    from flash_inductor.ops.layout import empty_like_layout

    qkv, given = case.inputs(device)
    config = {"config": configs.pop("fwd")} if "fwd" in configs else {}
    out, lse = cuda.forward(*qkv, **case.options(), **given, **config)
    generator = torch.Generator().manual_seed(1)
    grad_out = torch.randn(out.shape, generator=generator).to(out)
    # Row 3, hidden by finite numbers, is uniform over the keys in its band, and its lse has no digits left.
    hidden_by_numbers = case.bias_hides is not None and case.bias_hides > -torch.inf
    if hidden_by_numbers:
        grad_out[:, :, 3] = 0
    grad_lse = torch.randn(lse.shape, generator=generator).to(device) if case.grad_lse else None
    grads = cuda.backward(
        grad_out, grad_lse, *qkv, out, lse, **case.options(), **given,
        grad_mask=(True, True, True, case.bias is not None, False),
        **{f"{kind}_config": config for kind, config in configs.items()},
    )  # fmt: skip
    expected = case.reference(grad_out, grad_lse, qkv, given)
    if hidden_by_numbers:
        expected[0][:, :, 3] = qkv[2][:, :, :4].double().mean(2).repeat_interleave(case.heads // case.kv_heads, 1)
    problems = []
    names = ("out", "lse", "grad_query", "grad_key", "grad_value", "grad_bias")
    for name, got, want in zip(names, (out, lse, *grads), expected, strict=True):
        if want is None:
            continue
        if got.shape != want.shape:
            problems.append(f"{name}: {list(got.shape)} instead of {list(want.shape)}")
            continue
        finite = want.isfinite()
        if not torch.equal(got[~finite].double(), want[~finite]):
            problems.append(f"{name}: other infinite values")
        got, want = got[finite].double(), want[finite]
        ordinary = want.abs() < 1e30  # lse of a row hidden by the lowest number
        error = ((got - want).abs()[ordinary].max() / want[ordinary].abs().max().clamp(min=1e-30)).item()
        rounding = torch.finfo(case.bias_dtype).eps / 2 if name == "grad_bias" else 0.0
        if not error <= TOLERANCE[case.dtype] + rounding:
            problems.append(f"{name}: error {error:.2e}")
        if name == "grad_bias" and grads[3].stride() != empty_like_layout(given["bias"], given["bias"].shape).stride():
            problems.append("grad_bias: other strides than the fake's")
    if problems:
        raise AssertionError("; ".join(problems))
