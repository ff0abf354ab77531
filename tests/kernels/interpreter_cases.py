"""Kernel cases run through the Triton interpreter on CPU tensors, against the float64 reference.

``python interpreter_cases.py`` (in a process of its own: TRITON_INTERPRET must be set before triton is imported)
prints one JSON object, case name -> "" or what went wrong.
"""

from __future__ import annotations

import json
import math
import os
import traceback
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One call of forward and backward; ``mask`` holds the op's mask arguments."""

    q_len: int = 63
    kv_len: int = 63
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 16
    v_head_dim: int | None = None
    mask: dict[str, Any] = field(default_factory=dict)
    scale: float | None = None
    softcap: float | None = None
    dtype: str = "float32"
    layout: str = "bhnd"
    grad_lse: bool = False
    grad_mask: tuple[bool, bool, bool] = (True, True, True)
    poison: str | None = None  # which rows that nobody sees hold NaN and inf: "key" or "query"
    expanded_grad: bool = False


_CAUSAL = {"is_causal": True}
CASES: dict[str, Case] = {
    **{f"len_{n}": Case(q_len=n, kv_len=n, mask=_CAUSAL) for n in (1, 63, 127, 200)},
    "len_200_full": Case(q_len=200, kv_len=200),
    "no_keys": Case(q_len=5, kv_len=0),
    "no_queries": Case(q_len=0, kv_len=5),
    "longer_keys": Case(q_len=40, kv_len=130, mask={"is_causal": True, "diagonal": 90}),
    "longer_queries": Case(q_len=130, kv_len=40, mask={"is_causal": True, "diagonal": -90}),
    "cross": Case(q_len=100, kv_len=37),
    "gqa": Case(q_len=40, kv_len=40, batch=2, heads=6, kv_heads=2, mask=_CAUSAL),
    "mqa": Case(heads=4, q_len=40, kv_len=50),
    "window_0": Case(mask={"window_left": 0, "window_right": 0}),
    "window_wide": Case(mask={"window_left": 63, "window_right": 1 << 40}),
    "window_left": Case(q_len=200, kv_len=200, mask={"is_causal": True, "window_left": 40}),
    "window_both": Case(q_len=200, kv_len=150, mask={"window_left": 17, "window_right": 33, "diagonal": 5}),
    "window_right": Case(q_len=130, kv_len=150, mask={"window_right": 3}),
    "window_left_only": Case(q_len=130, kv_len=150, mask={"window_left": 70, "diagonal": 9}),
    "sees_nothing": Case(q_len=50, kv_len=50, mask={"window_left": 3, "window_right": 3, "diagonal": 1000}),
    "some_see_nothing": Case(q_len=130, kv_len=50, mask={"window_left": 3, "window_right": 2, "diagonal": -20}),
    "softcap": Case(mask=_CAUSAL, softcap=3.0),
    "softcap_large_scale": Case(softcap=2.0, scale=4.0),
    "scale_negative": Case(mask=_CAUSAL, scale=-0.7),
    "scale_zero": Case(mask=_CAUSAL, scale=0.0),
    "dim_40": Case(head_dim=40, mask=_CAUSAL),
    "dim_64": Case(head_dim=64, mask=_CAUSAL),
    "dim_96": Case(head_dim=96, mask=_CAUSAL),
    "dim_8": Case(head_dim=8),
    "dim_v_larger": Case(head_dim=24, v_head_dim=40, mask=_CAUSAL),
    "dim_v_smaller": Case(head_dim=40, v_head_dim=16, softcap=5.0),
    "fp16": Case(dtype="float16", mask=_CAUSAL, q_len=100, kv_len=100, head_dim=32),
    "bf16": Case(dtype="bfloat16", mask=_CAUSAL, q_len=100, kv_len=100, head_dim=32),
    "bf16_softcap_gqa": Case(dtype="bfloat16", softcap=4.0, heads=4, kv_heads=2, grad_lse=True),
    "grad_lse": Case(grad_lse=True, mask=_CAUSAL),
    "grad_lse_blind_rows": Case(q_len=130, kv_len=50, mask={"window_left": 3, "diagonal": -20}, grad_lse=True),
    **{
        "grad_mask_" + "".join("qkv"[i] for i in range(3) if m[i]): Case(grad_mask=m, mask=_CAUSAL)
        for m in ((True, False, False), (False, True, False), (False, False, True), (True, False, True))
    },
    "expanded_grad": Case(expanded_grad=True),
    **{
        f"layout_{name}": Case(
            q_len=33, kv_len=33, batch=2, heads=2, kv_heads=2, head_dim=24, layout=name, mask=_CAUSAL
        )
        for name in ("bnhd", "nbhd", "packed", "expanded", "sliced", "strided")
    },
    "poisoned_keys": Case(q_len=40, kv_len=120, mask=_CAUSAL, poison="key"),
    "poisoned_keys_window": Case(
        q_len=40, kv_len=200, mask={"window_left": 9, "window_right": 9, "diagonal": 70}, poison="key", softcap=3.0
    ),
    "poisoned_queries": Case(q_len=120, kv_len=40, mask={"is_causal": True, "diagonal": -50}, poison="query"),
}


def run(case: Case) -> None:
    """Raise AssertionError unless the kernels agree with the reference on this case."""
    from flash_inductor.kernels.configs import Config
    from flash_inductor.ops import cuda
    from flash_inductor.ops.layout import empty_like_layout
    from flash_inductor.reference import visible
    from flash_inductor.spec import AttentionSpec, MaskSpec
    from flash_inductor.testing import assert_close_to_reference, make_inputs

    query, key, value = make_inputs(
        case.layout, batch=case.batch, heads=case.heads, kv_heads=case.kv_heads, q_len=case.q_len, kv_len=case.kv_len,
        head_dim=case.head_dim, v_head_dim=case.v_head_dim, dtype=getattr(torch, case.dtype),
    )  # fmt: skip
    spec = AttentionSpec(case.scale, MaskSpec.from_window(**case.mask), case.softcap)
    if case.poison:
        seen = visible(spec.mask, case.q_len, case.kv_len)
        blind = ~seen.any(0 if case.poison == "key" else 1)
        if not blind.any():
            raise AssertionError("the case has no row to poison")
        for x in (key, value) if case.poison == "key" else (query,):
            x[:, :, blind] = math.nan
            x[:, :, blind.nonzero()[0]] = math.inf
    options: dict[str, Any] = {"scale": case.scale, "softcap": case.softcap, **case.mask}
    out, lse = cuda.forward(query, key, value, config=Config(32, 32, 4, 1), **options)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    if case.expanded_grad:
        grad_out = torch.tensor(0.5, dtype=out.dtype).expand(out.shape)
    grad_lse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(2)) if case.grad_lse else None
    # Tiles that aren't square, so that a mixed-up pair of names can't pass.
    *grads, _ = cuda.backward(
        grad_out, grad_lse, query, key, value, out, lse, **options, grad_mask=(*case.grad_mask, False, False),
        dq_config=Config(32, 16, 4, 1), dkdv_config=Config(16, 32, 4, 1),
    )  # fmt: skip
    if case.poison == "query":  # what the reference says of a row with a NaN query that sees nothing
        query = torch.nan_to_num(query, 0.0, 0.0, 0.0)
    wanted: list[Tensor | None] = [g if w else None for g, w in zip(grads, case.grad_mask, strict=True)]
    assert_close_to_reference([out, lse, *wanted], query, key, value, spec, grad_out=grad_out, grad_lse=grad_lse)
    for name, grad, like, asked in zip("qkv", grads, (query, key, value), case.grad_mask, strict=True):
        expected = empty_like_layout(like, like.shape) if asked else torch.empty(0)
        if (grad.shape, grad.stride()) != (expected.shape, expected.stride()):
            raise AssertionError(f"grad of {name}: {grad.shape}, {grad.stride()} is not the layout of the fake")
    if out.stride() != empty_like_layout(query, out.shape).stride():
        raise AssertionError(f"out: strides {out.stride()} are not those of the fake")


def patch_bf16_dot() -> None:
    """The interpreter multiplies the bit patterns of bfloat16 operands (triton 3.6 to 3.9): hand it float32 instead."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter.InterpreterBuilder.create_dot

    def upcast(x: Any) -> Any:
        if x.dtype.scalar is not tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return original(self, upcast(a), upcast(b), d, *rest)

    interpreter.InterpreterBuilder.create_dot = dot


def main() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("TRITON_INTERPRET: expected 1, set before the process starts")
    torch.set_num_threads(1)
    patch_bf16_dot()
    results = {}
    broken = replace(CASES["gqa"], scale=0.3)
    for name, case in CASES.items():
        try:
            run(case)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    results["control"] = _control(broken)
    results["nan_row"] = _nan_row()
    print(json.dumps(results))


def _nan_row() -> str:
    """What is not NaN where it should be: all scores of one query are NaN, those of the others aren't."""
    from flash_inductor.ops import cuda
    from flash_inductor.testing import make_inputs

    query, key, value = make_inputs(batch=1, heads=1, q_len=40, head_dim=16)
    query[:, :, 7] = math.nan
    wrong = []
    for name, options in (("full", {}), ("causal", {"is_causal": True})):
        for result, x in zip(("out", "lse"), cuda.forward(query, key, value, **options), strict=True):
            rows = x.reshape(40, -1).isnan()
            if not rows[7].all() or rows.any(1).sum() != 1:
                wrong.append(f"{name} {result}: NaN in rows {rows.any(1).nonzero().flatten().tolist()}")
    return ", ".join(wrong)


def _control(case: Case) -> str:
    """The error message of a run whose kernels are given another scale than the reference: it must not be empty."""
    from flash_inductor.ops import cuda

    original = cuda.forward
    cuda.forward = lambda *args, scale, **kwargs: original(*args, scale=scale * 1.01, **kwargs)
    try:
        run(case)
    except AssertionError as e:
        return str(e)
    finally:
        cuda.forward = original
    return ""


if __name__ == "__main__":
    main()
