"""What the generated code looks like: launches, buffers, fusion, index types."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import expecttest
import harness
import torch
from fakecuda import lower
from harness import qkv
from torch import Tensor

import flash_inductor
from flash_inductor.kernels.configs import Config
from flash_inductor.lowering import choices

attn = torch.ops.flashbwd.attn


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attn(query, key, value, is_causal=True)[0]


def launches(code: str) -> list[str]:
    """The allocations and kernel calls of a wrapper, without what differs between torch versions."""
    found = []
    for line in code.splitlines():
        allocation = re.match(r" *(\w+) = empty_strided_cuda\((.*)\)", line)
        if allocation:
            found.append(f"{allocation.group(1)} = empty({allocation.group(2)})")
        launch = re.match(r" *(triton_\w+?)(?:_\d+)?\.run\((.*), stream=\w+\)", line)
        if launch:
            arguments = launch.group(2)
            if not launch.group(1).startswith("triton_tem"):  # sizes of a reduction follow its tiling
                arguments = re.sub(r"(, \d+)+$", "", arguments)
            found.append(f"{launch.group(1)}({arguments})")
        called = re.search(r"= (extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", line)
        if called:
            found.append(called.group(1))
    return found


class TestLaunches(expecttest.TestCase):
    def test_training(self) -> None:
        # the grids follow the tuning table, which is free to change
        with mock.patch.object(choices, "tile_configs", lambda *args: (Config(128, 64, 4, 2),)):
            lowered = lower(causal, qkv(q_len=128, heads=4, kv_heads=2, dim=64, dtype=torch.bfloat16))
        text = "\n--\n".join("\n".join(launches(code)) for code in lowered.codes)
        self.assertExpectedInline(
            text,
            """\
buf0 = empty((1, 4, 128), (512, 128, 1), torch.float32)
buf1 = empty((1, 4, 128, 64), (32768, 64, 256, 1), torch.bfloat16)
triton_tem_fused_attn(primals_1, primals_2, primals_3, buf0, buf1, 4, 1, 1)
--
buf0 = empty((1, 4, 128), (512, 128, 1), torch.float32)
triton_per_fused_attn_backward(tangents_1, getitem, buf0)
buf3 = empty((1, 4, 128, 64), (32768, 64, 256, 1), torch.bfloat16)
triton_tem_fused_attn_backward(primals_1, primals_2, primals_3, getitem_1, buf0, tangents_1, buf3, 4, 1, 1)
buf4 = empty((1, 2, 128, 64), (16384, 64, 128, 1), torch.bfloat16)
buf5 = empty((1, 2, 128, 64), (16384, 64, 128, 1), torch.bfloat16)
triton_tem_fused_attn_backward(primals_1, primals_2, primals_3, getitem_1, buf0, tangents_1, buf4, buf5, 4, 1, 1)""",
        )


def test_lse_is_neither_written_nor_allocated_in_inference() -> None:
    lowered = lower(causal, [x.detach() for x in qkv(dtype=torch.bfloat16)])
    assert "torch.float32" not in "".join(launches(lowered.text))
    assert "LSE" not in lowered.text.replace("STORE_LSE", "")


def test_lse_is_written_when_read() -> None:
    lowered = lower(lambda q, k, v: attn(q, k, v)[1] * 2, [x.detach() for x in qkv(dtype=torch.bfloat16)])
    assert "tl.store(LSE" in lowered.text
    assert any("torch.float32" in line for line in launches(lowered.text))


def test_delta_fuses_with_the_producer_of_grad_out() -> None:
    lowered = lower(lambda q, k, v: torch.sigmoid(causal(q, k, v)), qkv())
    backward = launches(lowered.codes[1])
    kernels = [line for line in backward if line.startswith("triton_")]
    assert len(kernels) == 3
    assert "attn_backward" in kernels[0] and "sigmoid_backward" in kernels[0]


def test_pointwise_consumer_fuses_into_the_forward_template() -> None:
    inputs = [torch.randn(1, 2, 40, 16) for _ in range(3)]
    lowered = lower(lambda q, k, v: torch.sigmoid(causal(q, k, v)), inputs)
    (kernel,) = [line for line in launches(lowered.text) if line.startswith("triton_")]
    assert kernel.startswith("triton_tem_fused_attn_sigmoid")


def test_views_of_projections_are_read_in_place() -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(32, 96, bias=False)
            self.out = torch.nn.Linear(32, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(2, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, 2))
            return self.out(causal(q, k, v).transpose(1, 2).flatten(2))

    module = Attention()
    lowered = lower(lambda x: module(x), [torch.randn(2, 40, 32)])
    kernels = [line for line in launches(lowered.codes[0]) if line.startswith("triton_")]
    assert len(kernels) == 1 and kernels[0].startswith("triton_tem")


def test_gradients_nobody_wants_are_not_computed() -> None:
    inputs = [x.detach() for x in qkv()]
    inputs[0].requires_grad_()
    query_only = lower(causal, inputs)
    assert "grad_query_tile" in query_only.text and "grad_key_value_tile" not in query_only.text


def test_offsets_are_64_bit_only_where_they_must_be() -> None:
    def repeated(query: Tensor, key: Tensor, value: Tensor, times: int) -> Tensor:
        return causal(*(x.repeat(times, 1, 1, 1) for x in (query, key, value)))

    def index_types(times: int) -> set[str]:
        # nothing is allocated: the graph is never run
        lowered = lower(lambda q, k, v: repeated(q, k, v, times), [x.detach() for x in qkv(heads=16, dim=64)])
        template = [k.body for k in harness.interp.kernel_sources(lowered.text) if k.is_template]
        return {t for body in template for t in re.findall(r"INDEX_DTYPE : tl.constexpr = (\S+)", body)}

    assert index_types(8) == {"tl.int32"}
    assert index_types(1 << 16) == {"tl.int64"}


def test_many_heads_stay_within_the_grid() -> None:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return causal(*(x.repeat(40000, 1, 1, 1) for x in (query, key, value)))

    lowered = lower(call, [x.detach() for x in qkv()])
    (kernel,) = [line for line in launches(lowered.text) if line.startswith("triton_tem")]
    *_, x, y, z = kernel.rstrip(")").split(", ")
    assert int(x) >= 80000 and (y, z) == ("1", "1")


def test_constants_are_not_negative() -> None:
    def band(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attn(query, key, value, window_left=3, window_right=4, diagonal=-9)[0]

    lowered = lower(band, qkv())
    assert re.search(r"DIAGONAL_DOWN : tl.constexpr = 9", lowered.text)
    assert not re.search(r"tl.constexpr = -", lowered.text)


def test_dynamic_lengths_are_arguments() -> None:
    inputs: list[Any] = qkv()
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 2)
    lowered = lower(causal, inputs)
    templates = [k.body for k in harness.interp.kernel_sources(lowered.text) if k.is_template]
    assert len(templates) == 3
    for body in templates:
        assert re.search(r"Q_LEN = ks\d", body) and re.search(r"KV_LEN = ks\d", body)


def test_a_head_dim_that_dynamic_shapes_made_a_symbol_is_a_constant_again() -> None:
    def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    with flash_inductor.enabled():
        lowered = lower(sdpa, qkv(), dynamic=True)
    templates = [k.body for k in harness.interp.kernel_sources(lowered.text) if k.is_template]
    assert len(templates) == 3
    for body in templates:
        assert "HEAD_DIM : tl.constexpr = 16" in body and re.search(r"Q_LEN = ks\d", body)
