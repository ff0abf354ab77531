"""Bias, mask, segments, dropout, sinks and ranges on a CUDA device: eager kernels and compiled templates."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernels.feature_cases import CASES, TOLERANCE, Case, run
from torch import Tensor

import flash_inductor.lowering
import flash_inductor.ops
from flash_inductor.kernels.configs import Config, Kind, configs
from flash_inductor.ops import choice, cuda
from flash_inductor.ops.cuda_features import pair_bytes
from flash_inductor.ops.extras import Extras

pytestmark = pytest.mark.gpu
attn = torch.ops.flashbwd.attn
block_ranges = torch.ops.flashbwd.block_ranges


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    assert flash_inductor.lowering.registered
    torch.manual_seed(0)
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch.set_float32_matmul_precision(previous)


def at_size_of_a_layer(case: Case, dtype: torch.dtype) -> Case:
    square = case.q_len == case.kv_len
    return replace(
        case, q_len=333, kv_len=333 if square else 519, heads=4, kv_heads=2, head_dim=64, v_head_dim=None, dtype=dtype
    )


_FP16 = ("bias_causal_gqa", "mask_and_bias", "segments", "dropout", "everything", "fp16")  # runs the code of bfloat16


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in CASES for dtype in (torch.bfloat16, torch.float32)),
        *((name, torch.float16) for name in _FP16),
    ],
    ids=str,
)
def test_eager_matches_float64(name: str, dtype: torch.dtype) -> None:
    run(at_size_of_a_layer(CASES[name], dtype), "cuda")


# Head dims and features of models: T5 and Swin, GPT-2 and BERT, gpt-oss, Llama with documents, Gemma.
_TABLE: dict[str, Case] = {
    "bias_dropout": Case(bias="hmn", dropout=0.1, bias_dtype=torch.bfloat16),
    "padding_dropout": Case(padding="right", dropout=0.1),
    "mask_sinks": Case(mask="bmn", sinks=True, band={"is_causal": True, "window_left": 128}),
    "segments": Case(segments=4, band={"is_causal": True}),
}


def _rows() -> list[tuple[Kind, int, str, Config]]:
    """Every configuration that a launch with these features may choose."""
    capability, limit = choice.device_limits(0) if torch.cuda.is_available() else (90, None)
    kinds: tuple[Kind, ...] = ("fwd", "dq", "dkdv", "dbias")
    rows = []
    for name, case in _TABLE.items():
        _, given = replace(case, q_len=8, kv_len=8).inputs()
        extra = pair_bytes(Extras(**given), case.dropout)
        for kind in kinds:
            if kind == "dbias" and case.bias is None:
                continue
            for dim in (64, 128, 256):
                rows += [(kind, dim, name, c) for c in configs(kind, capability, dim, dim, 2, limit, extra)]
    return rows


def _id(value: Any) -> str:
    if not isinstance(value, Config):
        return str(value)
    return f"{value.block_m}x{value.block_n}-warps{value.num_warps}-stages{value.num_stages}"


@pytest.mark.parametrize(("kind", "dim", "name", "config"), _rows(), ids=_id)
def test_entry_of_the_table(kind: Kind, dim: int, name: str, config: Config) -> None:
    case = replace(_TABLE[name], q_len=500, kv_len=500, head_dim=dim, dtype=torch.bfloat16)
    run(case, "cuda", **{kind: config})


def test_repeats_bit_for_bit() -> None:
    case = replace(CASES["everything"], q_len=700, kv_len=700, head_dim=64, dtype=torch.bfloat16)
    qkv, given = case.inputs("cuda")
    out, lse = cuda.forward(*qkv, **case.options(), **given)
    grad_out = torch.randn_like(out)

    def backward() -> tuple[Tensor, ...]:
        return cuda.backward(
            grad_out, None, *qkv, out, lse, **case.options(), **given, grad_mask=(True, True, True, True, False)
        )

    first = backward()
    for _ in range(3):
        assert torch.equal(cuda.forward(*qkv, **case.options(), **given)[0], out)
        assert all(torch.equal(a, b) for a, b in zip(backward(), first, strict=True))


def test_dropout_keeps_the_asked_share() -> None:
    """With values of one, an output is the share of its probabilities that was kept, divided by what it should be."""
    query, key = (torch.zeros(4, 8, 1024, 64, dtype=torch.float16, device="cuda") for _ in range(2))
    value = torch.ones_like(key)
    rng_state = torch.tensor([99, 0], device="cuda")
    out, _ = cuda.forward(query, key, value, rng_state=rng_state, dropout_p=0.25)
    kept = out[..., 0].double() * 0.75
    pairs = 4 * 8 * 1024 * 1024
    assert abs(kept.mean().item() - 0.75) < 5 * (0.75 * 0.25 / pairs) ** 0.5 + 2**-12  # and fp16's rounding
    assert abs(kept.std().item() / (0.75 * 0.25 / 1024) ** 0.5 - 1) < 0.05
    other, _ = cuda.forward(query, key, value, rng_state=rng_state + 1, dropout_p=0.25)
    assert not torch.equal(out, other)


def everything(query: Tensor, key: Tensor, value: Tensor, given: dict[str, Tensor], **options: Any) -> Tensor:
    mask, ids = given.get("mask"), given.get("query_segments")
    padding = mask if mask is not None and mask.shape[1:3] == (1, 1) else None
    ranges = {}
    if padding is not None or ids is not None:
        found = block_ranges(padding, ids, given.get("key_segments"), query.shape[2], key.shape[2])
        ranges = dict(zip(("key_range", "query_range"), found, strict=True))
    out, lse = attn(query, key, value, **given, **ranges, **options)
    return out + lse.nan_to_num(neginf=0.0)[..., None].to(out.dtype)


def gradients(function: Callable[..., Tensor], qkv: Any, given: dict[str, Tensor], options: Any, grad: Any) -> Any:
    inputs = [x.detach().requires_grad_() for x in qkv]
    given = {k: x.detach().requires_grad_(k in ("bias", "sinks")) for k, x in given.items()}
    out = function(*inputs, given, **options)
    wanted = [*inputs, *(x for k, x in given.items() if k in ("bias", "sinks"))]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad.to(out))]


_COMPILED = (
    "bias_hmn", "bias_hn", "bias_expanded", "bias_of_minus_inf", "mask_bhmn", "mask_bm", "padding_left",
    "padding_causal", "segments", "segments_cross", "sinks", "sinks_bias_padding", "dropout", "dropout_bias_mask",
    "everything",
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", _COMPILED)
def test_compiled_matches_float64(name: str, dtype: torch.dtype) -> None:
    case = at_size_of_a_layer(CASES[name], dtype)
    qkv, given = case.inputs()
    grad = torch.randn(case.batch, case.heads, case.q_len, case.head_dim)
    wide = {k: x.double() if x.is_floating_point() else x for k, x in given.items()}
    expected = gradients(everything, [x.double() for x in qkv], wide, case.options(), grad)
    on_gpu = {k: x.cuda() for k, x in given.items()}
    compiled = torch.compile(everything, fullgraph=True)
    found = gradients(compiled, [x.cuda() for x in qkv], on_gpu, case.options(), grad.cuda())
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        error = ((a.cpu().double() - b).abs().max() / b.abs().max()).item()
        assert error <= TOLERANCE[dtype], (i, error)


def test_compiled_runs_as_templates() -> None:
    from torch._inductor.utils import run_and_get_code

    case = at_size_of_a_layer(CASES["everything"], torch.bfloat16)
    qkv, given = case.inputs("cuda")
    grad = torch.randn(case.batch, case.heads, case.q_len, case.head_dim, device="cuda")
    compiled = torch.compile(everything, fullgraph=True)
    _, codes = run_and_get_code(gradients, compiled, qkv, given, case.options(), grad)
    lines = [line for code in codes for line in code.splitlines() if not line.lstrip().startswith("#")]
    for name in ("forward_tile", "grad_query_tile", "grad_key_value_tile", "grad_bias_tile"):
        assert any(re.search(rf"\bimport .*\b{name}\b", line) for line in lines), name
    assert [line for line in lines if "torch.ops.flashbwd.attn" in line] == []


def test_blocks_outside_the_ranges_cost_nothing() -> None:
    """Of 16 documents of equal length each query sees a sixteenth: far less than half the time of seeing all."""
    shape = (2, 16, 8192, 64)
    query, key, value = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    ids = (torch.arange(8192, device="cuda", dtype=torch.int32) // 512)[None]
    ranges = block_ranges(None, ids, ids, 8192, 8192)
    packed = {"query_segments": ids, "key_segments": ids, "key_range": ranges[0], "query_range": ranges[1]}

    def milliseconds(**tensors: Tensor) -> float:
        out, lse = cuda.forward(query, key, value, **tensors)
        grad = torch.randn_like(out)

        def both() -> None:
            cuda.forward(query, key, value, **tensors)
            cuda.backward(grad, None, query, key, value, out, lse, **tensors)

        for _ in range(3):
            both()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(5):
            both()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    assert milliseconds(**packed) < 0.5 * milliseconds()
