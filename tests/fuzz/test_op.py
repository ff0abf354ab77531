"""The op with random sizes, layouts, dtypes and options, through autograd, against the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash_inductor.ops  # noqa: F401 - registers the op
from flash_inductor.ops.layout import empty_like_layout
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.testing import LAYOUTS, assert_close_to_reference, make_inputs

GRADIENTS = ("contiguous", "expanded", "one number", "transposed", "heads inside", "sliced")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Problem:
    """One call.  ``bias`` and ``mask`` say which dims are broadcast: "1" one entry, "e" expanded, "n" all."""

    seed: int
    layout: str
    dtype: torch.dtype
    batch: int
    kv_heads: int
    group: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    band: dict[str, Any]
    scale: float | None
    softcap: float | None
    bias: str | None
    mask: str | None
    segments: bool
    sinks: bool
    needy: frozenset[str]
    grad_out: str
    use_lse: bool

    @property
    def full(self) -> tuple[int, int, int, int]:
        return self.batch, self.kv_heads * self.group, self.q_len, self.kv_len


FORM = st.none() | st.text("1en", min_size=4, max_size=4)
LENGTH = st.sampled_from([0, 1, 2, 7, 16, 33, 40])
BAND = st.fixed_dictionaries(
    {
        "is_causal": st.booleans(),
        "window_left": st.none() | st.integers(0, 12),
        "diagonal": st.sampled_from([0, 0, "bottom right", 3, -2]),
    }
).map(lambda band: band | {"window_right": None if band["is_causal"] else 4 if band["window_left"] == 3 else None})
NAMES = ("query", "key", "value", "bias", "sinks")
PROBLEMS = st.builds(
    Problem,
    seed=st.integers(0, 99),
    layout=st.sampled_from([name for name in LAYOUTS if name != "packed"]),
    dtype=st.sampled_from(DTYPES),
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    q_len=LENGTH,
    kv_len=LENGTH,
    head_dim=st.sampled_from([4, 8, 17, 32]),
    v_head_dim=st.sampled_from([4, 8, 17, 32]),
    band=BAND,
    scale=st.sampled_from([None, None, 0.7, -0.4, 0.0]),
    softcap=st.sampled_from([None, None, 1.5]),
    bias=FORM,
    mask=FORM,
    segments=st.booleans(),
    sinks=st.booleans(),
    needy=st.sets(st.sampled_from(NAMES)).map(frozenset),
    grad_out=st.sampled_from(GRADIENTS),
    use_lse=st.booleans(),
)


def extras_of(p: Problem) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(p.seed)

    def shaped(form: str) -> Tensor:
        x = torch.randn([n if c == "n" else 1 for c, n in zip(form, p.full, strict=True)], generator=g)
        return x.expand([n if c != "1" else 1 for c, n in zip(form, p.full, strict=True)])

    extras: dict[str, Tensor] = {}
    if p.bias is not None:
        extras["bias"] = shaped(p.bias).to(p.dtype)
    if p.mask is not None:
        extras["mask"] = shaped(p.mask) > -0.7
    if p.segments:
        for name, length in (("query_segments", p.q_len), ("key_segments", p.kv_len)):
            extras[name] = torch.randint(0, 3, (p.batch, length), generator=g, dtype=torch.int32)
    if p.sinks:
        extras["sinks"] = torch.randn(p.full[1], generator=g).to(p.dtype)
    return extras


def cotangent(p: Problem, out: Tensor) -> Tensor:
    g = torch.Generator().manual_seed(p.seed + 1)
    batch, heads, length, dim = out.shape

    def rand(*size: int) -> Tensor:
        return torch.randn(size, generator=g).to(p.dtype)

    return {
        "contiguous": lambda: rand(*out.shape),
        "expanded": lambda: rand(1, 1, 1, dim).expand(out.shape),
        "one number": lambda: torch.ones((), dtype=p.dtype).expand(out.shape),
        "transposed": lambda: rand(batch, heads, dim, length).mT,
        "heads inside": lambda: rand(batch, length, heads, dim).transpose(1, 2),
        "sliced": lambda: rand(batch, heads, length + 3, 2 * dim)[:, :, 2 : length + 2, 1 : dim + 1],
    }[p.grad_out]()


def check(p: Problem, device: str = "cpu") -> None:
    sizes = {"batch": p.batch, "heads": p.full[1], "kv_heads": p.kv_heads, "q_len": p.q_len, "kv_len": p.kv_len}
    inputs = make_inputs(
        p.layout, **sizes, head_dim=p.head_dim, v_head_dim=p.v_head_dim, dtype=p.dtype, seed=p.seed, device=device
    )
    extras = {name: x.to(device) for name, x in extras_of(p).items()}
    leaves = dict(zip(NAMES, inputs, strict=False)) | {n: extras[n] for n in ("bias", "sinks") if n in extras}
    needy = {n: x.detach().requires_grad_() for n, x in leaves.items() if n in p.needy}
    before = {n: x.detach().clone() for n, x in {**leaves, **extras}.items()}
    band = p.band | {"diagonal": p.kv_len - p.q_len if p.band["diagonal"] == "bottom right" else p.band["diagonal"]}
    given_inputs = [needy.get(n, x) for n, x in zip(NAMES, inputs, strict=False)]
    given_extras = {n: needy.get(n, x) for n, x in extras.items()}
    out, lse = torch.ops.flashbwd.attn(*given_inputs, scale=p.scale, softcap=p.softcap, **band, **given_extras)
    assert out.stride() == empty_like_layout(inputs[0], out.shape).stride()
    assert out.requires_grad == bool(needy)
    grad_out = cotangent(p, out).to(device)
    grad_lse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(p.seed)).to(lse) if p.use_lse else None
    grads: dict[str, Tensor] = {}
    if needy:
        roots, cotangents = [out], [grad_out]
        if grad_lse is not None and lse.requires_grad:
            roots, cotangents = [out, lse], [grad_out, grad_lse]
        found = torch.autograd.grad(roots, list(needy.values()), cotangents, allow_unused=True)
        grads = {n: g for n, g in zip(needy, found, strict=True) if g is not None}
        assert set(grads) == set(needy)
    spec = AttentionSpec(p.scale, MaskSpec.from_window(**band), p.softcap)
    actual = [out.detach(), lse.detach(), *(grads.get(n) for n in NAMES)]
    assert_close_to_reference(actual, *inputs, spec, grad_out=grad_out, grad_lse=grad_lse, **extras)
    for n, x in {**leaves, **extras}.items():
        assert torch.equal(x, before[n]), f"{n} was written"


@settings(max_examples=max(250, settings.default.max_examples))
@given(PROBLEMS)
def test_the_op_is_right(p: Problem) -> None:
    check(p)


@pytest.mark.gpu  # nearly every example has to compile kernels
@given(PROBLEMS, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.sampled_from([8, 32, 64, 128]))
def test_the_op_is_right_on_a_gpu(p: Problem, dtype: torch.dtype, head_dim: int) -> None:
    check(replace(p, dtype=dtype, head_dim=head_dim, v_head_dim=head_dim if p.seed % 2 else 24), "cuda")
