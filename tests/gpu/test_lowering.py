"""The lowering on a real GPU: compiled forward and backward against eager in fp64 on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_inductor.lowering
import flash_inductor.ops
from flash_inductor import config

pytestmark = pytest.mark.gpu

# Relative to the largest value; 16-bit: p and ds are rounded before the second product, the result once more.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
attn = torch.ops.flashbwd.attn


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    assert flash_inductor.lowering.registered
    torch.manual_seed(0)
    torch._dynamo.reset()
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch.set_float32_matmul_precision(previous)


def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return attn(query, key, value, **options)[0]


def gated(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.sigmoid(call(query, key, value, is_causal=True)) * 2


def through_lse(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out, lse = attn(query, key, value, softcap=5.0)
    return out * lse[..., None].to(out.dtype)


def bottom_right(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return call(query, key, value, is_causal=True, diagonal=-(query.shape[2] - key.shape[2]))


def qkv(
    batch: int = 2,
    q_len: int = 200,
    kv_len: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    v_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Tensor]:
    kv_len = q_len if kv_len is None else kv_len
    shapes = [(q_len, heads, dim), (kv_len, kv_heads, dim), (kv_len, kv_heads, v_dim or dim)]
    return [
        torch.randn(batch, n, h, d, dtype=dtype, device="cuda").transpose(1, 2).requires_grad_() for n, h, d in shapes
    ]


def run(function: Callable[..., Tensor], inputs: list[Tensor], tangent: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    out = function(*inputs)
    return [out.detach().clone(), *torch.autograd.grad(out, inputs, tangent)]


def assert_right(function: Callable[..., Tensor], compiled: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    expected_out = function(*exact)
    tangent = torch.randn_like(expected_out).to(inputs[0].dtype)
    expected = [expected_out.detach(), *torch.autograd.grad(expected_out, exact, tangent.double())]
    got = run(compiled, inputs, tangent.cuda())
    for name, a, b in zip(("out", "grad_query", "grad_key", "grad_value"), got, expected, strict=True):
        error = ((a.cpu().double() - b).abs().max() / b.abs().max()).item()
        assert error <= TOLERANCE[inputs[0].dtype], (name, error)


def templates_of(function: Callable[..., Tensor], inputs: list[Tensor]) -> int:
    """Number of template kernels of ours in the code generated for forward and backward."""
    from torch._inductor.utils import run_and_get_code

    def forward_and_backward() -> None:
        out = function(*inputs)
        out.backward(torch.ones_like(out))

    _, codes = run_and_get_code(forward_and_backward)
    assert not any("torch.ops.flashbwd.attn.default(" in code for code in codes)
    return sum(code.count("from flash_inductor.kernels.forward import forward_tile") for code in codes) + sum(
        code.count("from flash_inductor.kernels.backward import") for code in codes
    )


CASES: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "full": (call, {}),
    "causal": (functools.partial(call, is_causal=True), {}),
    "window": (functools.partial(call, window_left=33, window_right=5), {"q_len": 300}),
    "band beside the diagonal": (functools.partial(call, window_left=20, window_right=10, diagonal=-40), {}),
    "softcap": (functools.partial(call, is_causal=True, window_left=64, softcap=3.0), {"dim": 128}),
    "bottom right": (bottom_right, {"q_len": 100, "kv_len": 231}),
    "rows that see nothing": (functools.partial(call, is_causal=True, diagonal=-70), {}),
    "head dims 72 and 40": (functools.partial(call, is_causal=True), {"dim": 72, "v_dim": 40}),
    "head dim 256": (functools.partial(call, is_causal=True), {"dim": 256}),
    "grad through lse": (through_lse, {}),
    "epilogue": (gated, {}),
}


_FP16 = ("causal", "softcap", "epilogue")  # its templates are those of bfloat16


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in CASES for dtype in (torch.bfloat16, torch.float32)),
        *((name, torch.float16) for name in _FP16),
    ],
    ids=str,
)
def test_agrees_with_eager(name: str, dtype: torch.dtype) -> None:
    function, sizes = CASES[name]
    assert_right(function, torch.compile(function, fullgraph=True), qkv(**sizes, dtype=dtype))


def test_runs_as_templates() -> None:
    compiled = torch.compile(gated, fullgraph=True)
    assert templates_of(compiled, qkv()) == 3


def test_dynamic_lengths_and_batch() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(bottom_right, backend=counter, fullgraph=True)
    # Every size differs from the second call on, so that one more compilation finds them all dynamic.
    for batch, q_len, kv_len in ((2, 128, 256), (4, 100, 301), (3, 77, 99), (5, 513, 1030)):
        assert_right(bottom_right, compiled, qkv(batch=batch, q_len=q_len, kv_len=kv_len))
    assert counter.frame_count <= 2


def test_max_autotune() -> None:
    function = functools.partial(call, is_causal=True)
    compiled = torch.compile(function, fullgraph=True, mode="max-autotune-no-cudagraphs")
    assert_right(function, compiled, qkv(q_len=300, dim=128))


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs(mode: str) -> None:
    compiled = torch.compile(gated, fullgraph=True, mode=mode)
    for _ in range(4):  # warm-up, recording, replays with new values
        torch.compiler.cudagraph_mark_step_begin()
        assert_right(gated, compiled, qkv())


def test_cpp_wrapper_forward() -> None:
    function = functools.partial(call, is_causal=True)
    compiled = torch.compile(function, fullgraph=True, options={"cpp_wrapper": True})
    inputs = [x.detach() for x in qkv()]
    expected = function(*(x.cpu().double() for x in inputs))
    error = (compiled(*inputs).cpu().double() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[torch.bfloat16], error


def test_cpp_wrapper_backward() -> None:
    def stock(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.softmax(query * key, -1) * value

    options = {"cpp_wrapper": True}
    inputs = qkv(kv_heads=4)
    try:
        run(torch.compile(stock, options=options), inputs, torch.ones_like(inputs[0]))
    except torch._inductor.exc.InductorError as error:
        pytest.xfail(f"the C++ wrapper of this torch compiles no backward with a reduction, ours or not: {error}")
    function = functools.partial(call, is_causal=True)
    assert_right(function, torch.compile(function, fullgraph=True, options=options), qkv())


def test_extern() -> None:
    with config.override(lowering="extern"):
        assert_right(gated, torch.compile(gated, fullgraph=True), qkv())


def test_more_batch_and_heads_than_the_second_grid_axis_holds() -> None:
    inputs = qkv(batch=20000, q_len=16, heads=4, kv_heads=4, dim=16)
    function = functools.partial(call, is_causal=True)
    assert_right(function, torch.compile(function, fullgraph=True), inputs)


def test_offsets_past_32_bits() -> None:
    """The last batch of tensors with more than 2**31 elements is right, forward and backward."""
    batch, heads, length, dim = 520, 16, 4096, 64
    if torch.cuda.mem_get_info()[0] < 48 << 30:
        pytest.skip("needs 48 GiB of free GPU memory")
    assert batch * heads * length * dim > 2**31
    x = torch.empty(batch, length, heads, dim, dtype=torch.bfloat16, device="cuda").normal_().transpose(1, 2)
    x.requires_grad_()
    function = functools.partial(call, is_causal=True, window_left=64)

    def self_attention(x: Tensor) -> Tensor:
        return function(x, x, x)

    compiled = torch.compile(self_attention, fullgraph=True)
    out = compiled(x)
    tangent = torch.randn(1, heads, length, dim, dtype=torch.bfloat16, device="cuda").expand(batch, -1, -1, -1)
    (grad,) = torch.autograd.grad(out, x, tangent)
    last = x[-1:].detach().requires_grad_()
    small = torch.compile(self_attention, fullgraph=True)(last)
    (small_grad,) = torch.autograd.grad(small, last, tangent[-1:])
    torch.testing.assert_close(out[-1:], small, rtol=0, atol=0)
    torch.testing.assert_close(grad[-1:], small_grad, rtol=0, atol=0)
