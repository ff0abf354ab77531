"""What PyTorch is told about the op: schema, fakes, strides, autograd."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_inductor.ops import attn, attn_backward, empty_like_layout
from flash_inductor.ops.layout import memory_order
from flash_inductor.testing import LAYOUTS, make_inputs

OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "window softcap": {"is_causal": True, "window_left": 5, "softcap": 2.0, "diagonal": 3},
    "both sides": {"window_left": 3, "window_right": 4},
}


def strides(tensors):
    return [(tuple(x.shape), x.stride(), x.dtype) for x in tensors]


def fake_copies(tensors):
    mode = FakeTensorMode()
    return mode, [None if x is None else mode.from_tensor(x) for x in tensors]


@pytest.mark.parametrize(
    ("layout", "kv_heads", "name"),
    [
        ("bhnd", 4, "full"),
        ("bnhd", 2, "causal"),
        ("bnhd", 1, "window softcap"),
        ("expanded", 2, "both sides"),
        ("sliced", 4, "window softcap"),
        ("strided", 2, "causal"),
    ],
)
def test_opcheck_forward(layout, kv_heads, name):
    inputs = make_inputs(layout, kv_heads=kv_heads, q_len=9, kv_len=9, head_dim=8, requires_grad=True)
    torch.library.opcheck(attn, inputs, OPTIONS[name])


@pytest.mark.parametrize(
    ("layout", "name", "grad_mask", "lse_grad"),
    [
        ("bhnd", "full", [True, True, True], False),
        ("bnhd", "causal", [False, True, False], False),
        ("bnhd", "window softcap", [True, True, True], True),
        ("expanded", "both sides", [True, False, True], True),
    ],
)
def test_opcheck_backward(layout, name, grad_mask, lse_grad):
    query, key, value = make_inputs(layout, kv_heads=2, q_len=9, head_dim=8)
    out, lse = attn(query, key, value, **OPTIONS[name])
    args = (torch.randn_like(out), torch.randn_like(lse) if lse_grad else None, query, key, value, out, lse)
    torch.library.opcheck(attn_backward, args, {**OPTIONS[name], "grad_mask": [*grad_mask, False, False]})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [{}, {"heads": 1}, {"batch": 1}, {"q_len": 1, "kv_len": 1}, {"kv_heads": 2}, {"batch": 1, "heads": 1}]
)
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["aten", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_and_real_agree_on_strides(layout, shape, softcap, dtype):
    """opcheck of torch 2.11 doesn't compare strides."""
    inputs = make_inputs(layout, dtype=dtype, **shape)
    outputs = attn(*inputs, softcap=softcap)
    grad_out = torch.ones_like(outputs[0])
    backward_inputs = (grad_out, None, *inputs, *outputs)
    grads = attn_backward(*backward_inputs, softcap=softcap)
    mode, fakes = fake_copies(backward_inputs)
    with mode:
        assert strides(attn(*fakes[2:5], softcap=softcap)) == strides(outputs)
        assert strides(attn_backward(*fakes, softcap=softcap)) == strides(grads)
    metas = [None if x is None else x.to("meta") for x in inputs]
    assert strides(attn(*metas, softcap=softcap)) == strides(outputs)
    assert outputs[1].is_contiguous()
    assert all(x.stride(-1) == 1 for x in (outputs[0], *grads[:3]))


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x != "packed"])
def test_strides_with_another_value_head_dim(layout):
    inputs = make_inputs(layout, kv_heads=2, q_len=10, kv_len=12, v_head_dim=24)
    outputs = attn(*inputs)
    mode, fakes = fake_copies(inputs)
    with mode:
        assert strides(attn(*fakes)) == strides(outputs)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "nbhd"])
def test_output_has_the_layout_of_sdpa(layout):
    query, key, value = make_inputs(layout)
    assert attn(query, key, value)[0].stride() == torch.empty_like(query).stride() == query.stride()
    wide = empty_like_layout(query, (2, 4, 24, 32))
    assert memory_order(wide.stride(), wide.shape) == memory_order(query.stride(), query.shape)


def test_layout_of_expanded_and_strided_inputs():
    x = torch.empty(1, 4, 24, 16).expand(3, 4, 24, 16)
    assert empty_like_layout(x, (3, 4, 24, 8)).is_contiguous()
    assert empty_like_layout(torch.empty(2, 4, 16, 24).mT, (2, 4, 24, 16)).is_contiguous()
    assert empty_like_layout(torch.empty(2, 3), (2, 5), torch.int64).dtype == torch.int64


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("which", ["out", "lse", "both"])
def test_gradcheck(options, kv_heads, which):
    inputs = make_inputs(
        batch=1, heads=4, kv_heads=kv_heads, q_len=6, kv_len=7, head_dim=3, v_head_dim=4 if kv_heads == 2 else 3,
        dtype=torch.float64, requires_grad=True,
    )  # fmt: skip

    def function(*tensors):
        out, lse = attn(*tensors, **options)
        # a row that sees nothing has lse -inf, whose numerical derivative is nan
        lse = lse.masked_fill(lse == -torch.inf, 0)
        return {"out": out, "lse": lse, "both": (out, lse)}[which]

    assert torch.autograd.gradcheck(function, inputs)


def calls(function):
    """The attn_backward calls that ``function`` makes, as (positional, keyword) arguments."""
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is attn_backward:
                seen.append((args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Watch():
        function()
    return seen


@pytest.mark.parametrize(
    "needed", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
def test_only_needed_gradients_are_asked_for(needed):
    inputs = make_inputs()
    for x, need in zip(inputs, needed, strict=True):
        x.requires_grad_(need)
    out = attn(*inputs)[0]
    ((_, kwargs),) = calls(lambda: out.sum().backward())
    assert kwargs["grad_mask"] == [*needed, False, False]
    assert [x.grad is not None for x in inputs] == list(needed)


def test_grad_of_lse_alone_and_of_neither():
    inputs = make_inputs(requires_grad=True)
    out, _ = attn(*inputs)
    ((args, _),) = calls(lambda: out.sum().backward())
    assert args[1] is None  # no zeros made for the lse nobody used
    query_grad = inputs[0].grad.clone()
    attn(*inputs)[1].sum().backward()
    assert not torch.allclose(inputs[0].grad, query_grad)
    assert not attn(*(x.detach() for x in inputs))[0].requires_grad


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_grad_out_with_strides_of_zero(layout):
    inputs = make_inputs(layout, requires_grad=True)
    out = attn(*inputs, is_causal=True)[0]
    expanded = torch.autograd.grad(out, inputs, torch.ones(()).expand_as(out), retain_graph=True)
    dense = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(expanded, dense, strict=True))


def test_double_backward_raises():
    """Without a registered autograd the first gradients would silently be constants."""
    inputs = make_inputs(requires_grad=True)
    (grad,) = torch.autograd.grad(attn(*inputs)[0].square().sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward is not supported"):
        grad.sum().backward()


@pytest.mark.parametrize("options", [OPTIONS["causal"], OPTIONS["window softcap"]], ids=["causal", "window softcap"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(options, dynamic):
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
    def function(query, key, value):
        out, lse = torch.ops.flashbwd.attn(query, key, value, **options)
        return out.transpose(1, 2).flatten(2) * 2, lse

    for q_len in (12, 33):
        inputs = make_inputs("bnhd", kv_heads=2, q_len=q_len, requires_grad=True)
        out, lse = function(*inputs)
        want, want_lse = attn(*inputs, **options)
        torch.testing.assert_close(out, want.transpose(1, 2).flatten(2) * 2)
        torch.testing.assert_close(lse, want_lse)
        grads = torch.autograd.grad(out.sum() + lse.sum(), inputs)
        wanted = torch.autograd.grad(2 * want.sum() + want_lse.sum(), inputs)
        torch.testing.assert_close(grads, wanted)


def test_dynamic_lengths_compile_once_and_merge():
    """The fake says that key and value have the same length, and nothing else about lengths."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda *x: attn(*x, is_causal=True)[0], backend=counter, fullgraph=True, dynamic=True)
    for q_len, kv_len in ((7, 9), (30, 20), (64, 64), (5, 600)):
        function(*make_inputs(q_len=q_len, kv_len=kv_len))
    assert counter.frame_count == 1


def test_symbolic_window_and_diagonal():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def function(query, key, value):
        shift = key.shape[2] - query.shape[2]
        return attn(query, key, value, is_causal=True, window_left=query.shape[2] // 2, diagonal=shift)[0]

    for q_len, kv_len in ((10, 14), (20, 31)):
        inputs = make_inputs(q_len=q_len, kv_len=kv_len)
        want = attn(*inputs, is_causal=True, window_left=q_len // 2, diagonal=kv_len - q_len)[0]
        torch.testing.assert_close(function(*inputs), want)
    assert counter.frame_count == 1


def test_checkpoint_and_export():
    inputs = make_inputs(requires_grad=True)
    want = torch.autograd.grad(attn(*inputs, is_causal=True)[0].sum(), inputs)
    again = torch.utils.checkpoint.checkpoint(lambda *x: attn(*x, is_causal=True)[0], *inputs, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.sum(), inputs), want)

    class Module(torch.nn.Module):
        def forward(self, query, key, value):
            return attn(query, key, value, softcap=3.0)[0]

    plain = tuple(x.detach() for x in inputs)
    program = torch.export.export(Module(), plain)
    torch.testing.assert_close(program.module()(*plain), Module()(*plain))
