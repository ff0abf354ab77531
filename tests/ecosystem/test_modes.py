"""Modes of torch.compile and of torch, adapters and quantisers, with the plugin on: outputs and gradients of eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import flash_inductor
from flash_inductor.report import collect

from .model import Attention, Model, causal, make_qkv, softcapped, step

GPU = pytest.mark.gpu


def check(model: Any, compiled: Any, inputs: list[Tensor]) -> None:
    """A step of ``compiled`` equals one of ``model``, and its attention was replaced."""
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    expected = step(model, inputs, parameters)
    with flash_inductor.enabled(), collect() as sites:
        got = step(compiled, inputs, parameters)
    assert [s.replaced for s in sites] == [True], [s.reason for s in sites]
    torch.testing.assert_close(got, expected)


def test_dynamic_with_marked_dims_compiles_once() -> None:
    """A batch and a length that are marked never specialise, though the mask is proved for every length."""
    graphs = CompileCounterWithBackend("inductor")
    compiled = torch.compile(softcapped, dynamic=True, fullgraph=True, backend=graphs)
    for batch, length in ((2, 32), (5, 70)):
        inputs = [torch.randn(batch, 2, length, 16, requires_grad=True) for _ in range(3)]
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 2)
        expected = step(softcapped, inputs)
        with flash_inductor.enabled():
            torch.testing.assert_close(step(compiled, inputs), expected)
    assert graphs.frame_count == 1


def test_inference_mode() -> None:
    """Compiled and called there, then called outside, with gradients."""
    compiled = torch.compile(softcapped)
    with flash_inductor.enabled(), collect() as sites:
        with torch.inference_mode():
            inputs = [x.detach().clone() for x in make_qkv()]
            out = compiled(*inputs)
            assert out.is_inference()
            torch.testing.assert_close(out, softcapped(*inputs))
        leaves = make_qkv()
        torch.testing.assert_close(step(compiled, leaves), step(softcapped, leaves))
    assert [s.replaced for s in sites] == [True, True]


def test_deterministic_algorithms() -> None:
    """Bit for bit the same twice; turning the mode on compiles again instead of serving what was compiled before."""
    inputs = make_qkv(64)
    graphs = CompileCounterWithBackend("inductor")
    compiled = torch.compile(causal, backend=graphs)
    with flash_inductor.enabled():
        before = step(compiled, inputs)
        torch.use_deterministic_algorithms(True)
        try:
            first, second = step(compiled, inputs), step(compiled, inputs)
        finally:
            torch.use_deterministic_algorithms(False)
    assert graphs.frame_count == 2
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, before)


def test_lora_of_peft() -> None:
    """Adapters around the projections: only they get gradients."""
    from peft import LoraConfig, get_peft_model  # here: the GPU tests of this file don't need it

    config = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(Model(layers=1), config)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    check(model, torch.compile(model, fullgraph=True), [torch.randn(2, 32, 32)])


class Int8Linear(nn.Module):
    """Weights as int8 with a scale for each output, as weight-only quantisers store them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def test_int8_projections() -> None:
    model = Attention(32, 4)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(model, name, Int8Linear(getattr(model, name)))
    check(model, torch.compile(model, fullgraph=True), [torch.randn(2, 32, 32, requires_grad=True)])


def test_dynamically_quantised_projections() -> None:
    model = torch.ao.quantization.quantize_dynamic(Attention(32, 4), {nn.Linear}, dtype=torch.qint8)
    x = torch.randn(2, 32, 32)
    with flash_inductor.enabled(), torch.no_grad(), collect() as sites:
        out = torch.compile(model)(x)
    torch.testing.assert_close(out, model(x))
    assert [s.replaced for s in sites] == [True]


@GPU
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_modes_on_the_gpu(mode: str, dynamic: bool) -> None:
    """Several steps with new values: warm-up, recording and replays of CUDA graphs."""
    exact = Model(dim=128, heads=2, layers=1).cuda()
    model = copy.deepcopy(exact).bfloat16()
    with flash_inductor.enabled(), collect() as sites:
        compiled = torch.compile(model, mode=mode, dynamic=dynamic, fullgraph=True)
        for length in (64, 64, 64, 100):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.randn(2, length, 128, device="cuda")
            got = [g.float().clone() for g in step(compiled, [x.bfloat16()], model.parameters()) if g is not None]
            expected = step(exact, [x], exact.parameters())
            for a, b in zip(got, expected, strict=True):
                assert (a - b).norm() <= 0.05 * b.norm() + 1e-4
    assert all(s.replaced for s in sites) and sites


@GPU
def test_deterministic_algorithms_on_the_gpu() -> None:
    inputs = make_qkv(300, torch.bfloat16, "cuda")
    compiled = torch.compile(causal)
    with flash_inductor.enabled():
        torch.use_deterministic_algorithms(True)
        try:
            first, second = step(compiled, inputs), step(compiled, inputs)
        finally:
            torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
