"""Every kernel by name on a CUDA device, against float64, in all pairs of forward and backward."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import flash_inductor.lowering
from flash_inductor import config
from flash_inductor.kernels.choices import KERNELS
from flash_inductor.ops import attn, attn_backward, choice, empty_like_layout, hopper
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.testing import assert_close_to_reference, make_inputs

pytestmark = pytest.mark.gpu
SPECS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True, "scale": 0.1},
    "window_softcap": {"is_causal": True, "window_left": 100, "softcap": 20.0},
}


@pytest.fixture(autouse=True)
def free_choice() -> Iterator[None]:
    assert flash_inductor.lowering.registered
    torch.manual_seed(0)
    torch._dynamo.reset()
    with config.override(kernel="auto"), torch._inductor.config.patch(force_disable_caches=True):
        yield


def problem_of(kind: Any, query: Tensor, value: Tensor, options: dict[str, Any]) -> choice.Problem:
    lengths = (query.shape[2], value.shape[2])
    mask = MaskSpec.from_window(**{k: v for k, v in options.items() if k not in ("scale", "softcap")})
    band, square = choice.classify(mask, *lengths, same_length=lengths[0] == lengths[1])
    return choice.Problem(
        kind, choice.device_limits(0)[0], query.dtype, query.shape[3], value.shape[3], lengths, band, square,
        options.get("scale"), options.get("softcap") is not None,
    )  # fmt: skip


def spec_of(options: dict[str, Any]) -> AttentionSpec:
    mask = MaskSpec.from_window(**{k: v for k, v in options.items() if k not in ("scale", "softcap")})
    return AttentionSpec(options.get("scale"), mask, options.get("softcap"))


def run_pair(forward: str, backward: str, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> list[Tensor]:
    out, lse = attn(*inputs, **options, kernel_name=forward)
    grad_out = torch.randn_like(out)
    grads = attn_backward(grad_out, None, *inputs, out, lse, **options, kernel_name=backward)
    assert out.stride() == empty_like_layout(inputs[0], out.shape).stride()
    assert lse.is_contiguous() and lse.dtype is torch.float32
    for grad, x in zip(grads, inputs, strict=False):
        assert grad.stride() == empty_like_layout(x, x.shape).stride()
    results = [out, lse, *grads[:3]]
    assert_close_to_reference(results, *inputs, spec_of(options), grad_out=grad_out)
    return results


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_pairs(dim: int, spec: str) -> None:
    """All in one test: a worker compiles each kernel once, and others nothing of the same."""
    options = SPECS[spec]
    inputs = make_inputs("bnhd", q_len=333, head_dim=dim, dtype=torch.bfloat16, device="cuda")
    fits = {kind: {n for n in KERNELS if choice.fits(n, problem_of(kind, inputs[0], inputs[2], options))}
            for kind in ("fwd", "bwd")}  # fmt: skip
    assert "triton" in fits["fwd"] & fits["bwd"]
    wrong = {}
    for forward, backward in itertools.product(KERNELS, repeat=2):
        try:
            if forward in fits["fwd"] and backward in fits["bwd"]:
                run_pair(forward, backward, inputs, options)
            else:
                missing = backward if forward in fits["fwd"] else forward
                with pytest.raises(NotImplementedError, match=f"kernel_name: {missing} was asked for"):
                    run_pair(forward, backward, inputs, options)
        except Exception as error:
            wrong[forward, backward] = f"{type(error).__name__}: {error}"
    assert not wrong, wrong


@pytest.mark.parametrize("layout", ["bhnd", "nbhd", "packed", "expanded", "sliced", "strided"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_layouts_and_grouped_heads(kernel: str, layout: str) -> None:
    inputs = make_inputs(layout, heads=8, kv_heads=2, q_len=200, head_dim=64, dtype=torch.float16, device="cuda")
    if not choice.fits(kernel, problem_of("fwd", inputs[0], inputs[2], {})):
        pytest.skip(f"no {kernel} kernel on this device")
    run_pair(kernel, kernel, inputs, {"is_causal": True})


def test_lse_that_is_not_aligned() -> None:
    """The second call of its kind, when the first one's kernels may load 16 bytes at once."""
    inputs = make_inputs("bnhd", q_len=200, head_dim=64, dtype=torch.bfloat16, device="cuda")
    out, lse = attn(*inputs, is_causal=True)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    expected = attn_backward(grad_out, grad_lse, *inputs, out, lse, is_causal=True)[:3]
    shifted = [torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape) for x in (grad_lse, lse)]
    assert all(x.data_ptr() % 16 for x in shifted)
    found = attn_backward(grad_out, shifted[0], *inputs, out, shifted[1], is_causal=True)[:3]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("first", [None, False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_of_any_layout(kernel: str, first: bool | None) -> None:
    """One after the other, because torch reuses plans of cuDNN's backward for tensors that lie otherwise.

    ``first``: whether SDPA's own backward ran before with a gradient that lies with the heads inside, if at all.
    """
    for dims, options in (((64, 64), {}), ((192, 128), {"is_causal": True})):
        inputs = make_inputs(
            "bnhd", q_len=256, head_dim=dims[0], v_head_dim=dims[1], dtype=torch.bfloat16, device="cuda"
        )
        if not choice.fits(kernel, problem_of("bwd", inputs[0], inputs[2], options)):
            continue
        if first is not None:
            leaves = [x.detach().requires_grad_() for x in inputs]
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
                out = torch.nn.functional.scaled_dot_product_attention(*leaves, **options)
            tangent = torch.randn_like(out.contiguous())
            torch.autograd.grad(out, leaves, heads_inside(tangent) if first else tangent)
        for out_inside, grad_inside in itertools.product((False, True), repeat=2):
            out, lse = attn(*inputs, **options)
            grad_out = torch.randn_like(out.contiguous())
            saved = heads_inside(out) if out_inside else out.contiguous()
            tangent = heads_inside(grad_out) if grad_inside else grad_out
            grads = attn_backward(tangent, None, *inputs, saved, lse, **options, kernel_name=kernel)[:3]
            assert_close_to_reference([out, lse, *grads], *inputs, spec_of(options), grad_out=grad_out)


def heads_inside(x: Tensor) -> Tensor:
    """The same values as a view of [B, N, H, D] memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("kernel", KERNELS)
def test_misaligned_pointers_run_as_triton(kernel: str) -> None:
    storage = torch.randn(3, 2 * 4 * 128 * 64 + 1, dtype=torch.bfloat16, device="cuda")
    inputs = tuple(x[1:].view(2, 4, 128, 64) for x in storage)
    if not choice.fits(kernel, problem_of("fwd", inputs[0], inputs[2], {})):
        pytest.skip(f"no {kernel} kernel on this device")
    run_pair(kernel, kernel, inputs, {})
    run_pair(kernel, kernel, tuple(x.clone() for x in inputs), {})  # known by shapes and strides, but aligned
    run_pair(kernel, kernel, inputs, {})


def compiled_calls(function: Callable[..., Any], *args: Any, **compile_options: Any) -> tuple[Any, str]:
    result, codes = run_and_get_code(torch.compile(function, fullgraph=True, **compile_options), *args)
    return result, "\n".join(codes)


def layer(x: Tensor, **options: Any) -> Tensor:
    query, key, value = (t.transpose(1, 2) for t in x.unflatten(2, (3, 4, 128)).unbind(2))
    return attn(query, key, value, is_causal=True, **options)[0].transpose(1, 2).flatten(2)


def exact_layer(x: Tensor) -> tuple[Tensor, Tensor]:
    exact = x.detach().cpu().double().requires_grad_()
    out = layer(exact)
    return out.detach(), torch.autograd.grad(out.square().sum(), exact)[0]


def assert_layer_right(out: Tensor, grad: Tensor, x: Tensor) -> None:
    for got, want in zip((out, grad), exact_layer(x), strict=True):
        error = (got.detach().cpu().double() - want).abs().max() / want.abs().max()
        assert error <= 2**-6, error


@pytest.mark.parametrize("mode", [None, "reduce-overhead", "max-autotune"])
def test_compiled(mode: str | None) -> None:
    """CUDA graphs: warm-up, recording, then replays with other values."""
    hopper._counters.clear()  # the first launch of all is in the warm-up, whose pool nothing may stay in
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(2, 640, 3 * 4 * 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        out = compiled(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        assert_layer_right(out.clone(), grad.clone(), x)


def test_two_graphs_replayed_at_once() -> None:
    """Kernels that share a counter between launches must not share it between graphs."""
    inputs = [make_inputs(q_len=1024, head_dim=128, dtype=torch.bfloat16, device="cuda", seed=i) for i in range(2)]
    want = [attn(*x, is_causal=True)[0] for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    graphs, got = [], []
    torch.cuda.synchronize()
    for x, stream in zip(inputs, streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got.append(attn(*x, is_causal=True)[0])
        graphs.append(graph)
    for _ in range(20):
        for out in got:
            out.zero_()
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_the_chosen_kernel_is_in_the_code() -> None:
    x = torch.randn(2, 1024, 3 * 4 * 128, dtype=torch.bfloat16, device="cuda")
    query = x.view(2, 1024, 3, 4, 128)[:, :, 0].transpose(1, 2)
    name = choice.choose(problem_of("fwd", query, query, {"is_causal": True}))
    out, code = compiled_calls(layer, x)
    assert (f"kernel_name='{name}'" in code) == (name != "triton")
    error = (out.cpu().double() - exact_layer(x)[0]).abs().max()
    assert error <= 2**-5


def test_cpp_wrapper() -> None:
    x = torch.randn(2, 1024, 3 * 4 * 128, dtype=torch.bfloat16, device="cuda")
    with config.override(kernel="flash"):
        out, code = compiled_calls(layer, x, options={"cpp_wrapper": True})
    assert re.search(r"kernel_name='flash'|\"flash\"", code)
    error = (out.cpu().double() - exact_layer(x)[0]).abs().max()
    assert error <= 2**-5


def test_dynamic_lengths_compile_once() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for length in (1024, 77, 513, 33):
        x = torch.randn(2, length, 3 * 4 * 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        out = compiled(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        assert_layer_right(out, grad, x)
    assert counter.frame_count == 1


def test_deterministic_algorithms() -> None:
    """The same bits each time, also where compiled code names a kernel that can't promise them."""
    inputs = make_inputs("bnhd", q_len=2048, head_dim=128, dtype=torch.bfloat16, device="cuda")
    out, lse = attn(*inputs, is_causal=True)
    grad_out = torch.randn_like(out)
    names = [None, *(n for n in KERNELS if choice.fits(n, problem_of("bwd", inputs[0], inputs[2], {})))]
    torch.use_deterministic_algorithms(True)
    try:
        for name in names:
            first, *others = (
                attn_backward(grad_out, None, *inputs, out, lse, is_causal=True, kernel_name=name)[:3]
                for _ in range(10)
            )
            assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True)), name
    finally:
        torch.use_deterministic_algorithms(False)


def test_gradient_of_lse() -> None:
    inputs = make_inputs("bnhd", q_len=1024, head_dim=128, dtype=torch.bfloat16, device="cuda")
    out, lse = attn(*inputs)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    grads = attn_backward(grad_out, grad_lse, *inputs, out, lse)
    assert_close_to_reference([out, lse, *grads[:3]], *inputs, grad_out=grad_out, grad_lse=grad_lse)
    with pytest.raises(NotImplementedError, match="no gradient of lse"):
        attn_backward(grad_out, grad_lse, *inputs, out, lse, kernel_name="flash")


@pytest.mark.parametrize("name", ["attn", "attn_backward"])
def test_opcheck(name: str) -> None:
    inputs = make_inputs("bnhd", kv_heads=2, q_len=128, head_dim=64, dtype=torch.bfloat16, device="cuda")
    out, lse = attn(*inputs, is_causal=True)
    args = inputs if name == "attn" else (torch.randn_like(out), None, *inputs, out, lse)
    checks = ("test_schema", "test_faketensor")  # the others compare bits of what atomics may have summed
    torch.library.opcheck(attn if name == "attn" else attn_backward, args, {"is_causal": True}, test_utils=checks)


def test_all_measured_under_max_autotune(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="flash_inductor.lowering.measure"):
        x = torch.randn(2, 896, 3 * 4 * 128, dtype=torch.bfloat16, device="cuda")
        torch.compile(layer, fullgraph=True, mode="max-autotune-no-cudagraphs")(x)
    query = x.view(2, 896, 3, 4, 128)[:, :, 0].transpose(1, 2)
    names = choice.eligible(problem_of("fwd", query, query, {"is_causal": True}))
    messages = [r.getMessage() for r in caplog.records if r.name.endswith("measure")]
    assert len(messages) == 1 and all(f"{name} " in messages[0] for name in names)
