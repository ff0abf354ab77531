"""Generated code, executed: forward and backward agree with eager in fp64, and only our templates compute attention."""

from __future__ import annotations

import functools
from typing import Any

import harness
import pytest
import torch
from harness import Case, qkv
from torch import Tensor

attn = torch.ops.flashbwd.attn


def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return attn(query, key, value, **options)[0]


def with_options(**options: Any) -> Any:
    return functools.partial(call, **options)


def through_lse(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out, lse = attn(query, key, value, softcap=5.0)
    return out * lse[..., None].to(out.dtype)


def packed(x: Tensor) -> Tensor:
    query, key, value = (t.transpose(1, 2) for t in x.unbind(2))
    return call(query, key, value, is_causal=True)


def same_tensor(x: Tensor) -> Tensor:
    return call(x, x, x)


def strided_last_dim(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return call(query.transpose(2, 3), key, value)


def expanded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    # query is touched first, because Dynamo orders the inputs of a graph by their first use
    return call(query.expand(2, -1, -1, -1), key.expand(2, -1, -1, -1), value.expand(2, -1, -1, -1))


def epilogue(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.sigmoid(call(query * 2 + 1, key, value, is_causal=True)) * 2


def bottom_right(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return call(query, key, value, is_causal=True, window_left=9, diagonal=-(query.shape[2] - key.shape[2]))


def dynamic(inputs: list[Tensor], *dims: int) -> list[Tensor]:
    for x in inputs:
        for dim in dims:
            torch._dynamo.mark_dynamic(x, dim)
    return inputs


CASES: dict[str, Any] = {
    "full": lambda: Case(call, qkv()),
    "causal": lambda: Case(with_options(is_causal=True), qkv(q_len=72)),
    "gqa": lambda: Case(with_options(is_causal=True, scale=0.3), qkv(batch=2, heads=4, kv_heads=2)),
    "window": lambda: Case(with_options(window_left=5, window_right=3), qkv(q_len=70)),
    "band beside the diagonal": lambda: Case(with_options(window_left=2, window_right=1, diagonal=-7), qkv()),
    "softcap": lambda: Case(with_options(softcap=2.0, is_causal=True, window_left=11), qkv()),
    "bottom right": lambda: Case(bottom_right, qkv(q_len=24, kv_len=40)),
    "rows that see nothing": lambda: Case(with_options(is_causal=True, diagonal=-9), qkv(q_len=30, kv_len=20)),
    "head dims 24 and 40": lambda: Case(with_options(is_causal=True), qkv(dim=24, v_dim=40)),
    "grad through lse": lambda: Case(through_lse, qkv()),
    "packed": lambda: Case(packed, [torch.randn(2, 40, 3, 2, 16, requires_grad=True)]),
    "same tensor": lambda: Case(same_tensor, [torch.randn(2, 2, 40, 16, requires_grad=True)]),
    "strided last dim": lambda: Case(
        strided_last_dim, [torch.randn(1, 2, *s, requires_grad=True) for s in ((16, 40), (40, 16), (40, 16))]
    ),
    "expanded": lambda: Case(expanded, [torch.randn(b, 2, 40, 16, requires_grad=True) for b in (2, 1, 1)]),
    "epilogue": lambda: Case(epilogue, qkv()),
    "no grad for key": lambda: Case(call, [x.requires_grad_(i != 1) for i, x in enumerate(detached())]),
    "grad for query only": lambda: Case(call, [x.requires_grad_(i == 0) for i, x in enumerate(detached())]),
    "grad for key only": lambda: Case(call, [x.requires_grad_(i == 1) for i, x in enumerate(detached())]),
    "inference": lambda: Case(call, detached()),
    "fp16": lambda: Case(with_options(is_causal=True), qkv(dtype=torch.float16)),
    "bf16": lambda: Case(with_options(is_causal=True, softcap=4.0), qkv(dtype=torch.bfloat16, heads=4, kv_heads=1)),
    "dynamic lengths": lambda: Case(
        with_options(is_causal=True, softcap=3.0),
        dynamic(qkv(q_len=40, heads=2, kv_heads=1), 2),
        runs=[qkv(q_len=40, heads=2, kv_heads=1), qkv(q_len=75, heads=2, kv_heads=1)],
    ),
    "dynamic batch and both lengths": lambda: Case(
        bottom_right,
        dynamic(qkv(batch=2, q_len=24, kv_len=40), 0, 2),
        runs=[qkv(batch=2, q_len=24, kv_len=40), qkv(batch=3, q_len=17, kv_len=66)],
    ),
}


def detached() -> list[Tensor]:
    return [x.detach() for x in qkv()]


@pytest.fixture(scope="module")
def executed() -> Any:
    return harness.execute(CASES)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_eager(name: str, executed: Any) -> None:
    _, errors = executed[name]
    assert not isinstance(errors, str), errors
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name, torch.float32)
    assert max(errors) <= harness.TOLERANCE[dtype], errors


@pytest.mark.parametrize("name", CASES)
def test_only_our_templates(name: str, executed: Any) -> None:
    lowered, _ = executed[name]
    kernels = harness.interp.kernel_sources(lowered.text)
    imported = [k.body.partition("from flash_inductor.kernels.")[2].split()[2] for k in kernels if k.is_template]
    expected = ["forward_tile"]
    if len(lowered.codes) > 1:
        expected += ["grad_query_tile"] * (name not in ("grad for key only",))
        expected += ["grad_key_value_tile"] * (name not in ("grad for query only",))
    # the scheduler may put the last two in either order
    assert sorted(imported) == sorted(expected)
    for other in ("aten.bmm", "extern_kernels.bmm", "softmax", "torch.ops.flashbwd", "scaled_dot_product"):
        calls = [line for line in lowered.text.splitlines() if other in line and not line.startswith("#")]
        assert not calls
