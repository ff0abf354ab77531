"""Autocast, vmap and the FLOP counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flash_inductor.ops import attn, attn_backward
from flash_inductor.testing import make_inputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_uses_the_active_dtype(dtype):
    inputs = make_inputs(requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        out, lse = attn(*inputs, is_causal=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    want = attn(*(x.to(dtype) for x in inputs), is_causal=True)[0]
    assert torch.equal(out, want)
    out.float().sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in inputs)


def test_autocast_takes_mixed_dtypes_and_can_be_off():
    query, key, value = make_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attn(query, key.bfloat16(), value.half())[0].dtype == torch.bfloat16
        assert attn(query.double(), key.double(), value.double())[0].dtype == torch.float64  # as other ops: left alone
        with torch.autocast("cpu", enabled=False):
            assert attn(query, key, value)[0].dtype == torch.float32
            with pytest.raises(TypeError, match=r"key: expected torch\.float32"):
                attn(query, key.bfloat16(), value)


def test_autocast_compiled():
    torch._dynamo.reset()
    function = torch.compile(lambda *x: attn(*x, is_causal=True)[0], backend="aot_eager", fullgraph=True)
    inputs = make_inputs(requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, want = function(*inputs), attn(*inputs, is_causal=True)[0]
    torch.testing.assert_close(out, want)
    out.float().sum().backward()


@pytest.mark.parametrize("dims", [(0, 0, 0), (1, 0, None), (0, None, None), (2, 3, 1)])
def test_vmap(dims):
    size, options = 3, {"is_causal": True, "window_left": 4, "softcap": 2.0}
    plain = make_inputs(batch=size * 2, kv_heads=2)
    inputs, singles = [], []
    for x, dim in zip(plain, dims, strict=True):
        stacked = x.unflatten(0, (size, 2))
        inputs.append(stacked[0] if dim is None else stacked.movedim(0, dim))
        singles.append([stacked[0 if dim is None else i] for i in range(size)])
    out, lse = torch.vmap(lambda *x: attn(*x, **options), in_dims=dims)(*inputs)
    for i in range(size):
        torch.testing.assert_close((out[i], lse[i]), attn(*(s[i] for s in singles), **options))


@pytest.mark.parametrize("grad_mask", [[True, True, True, False, False], [True, False, False, False, False]])
@pytest.mark.parametrize("lse_dim", [0, None])
def test_vmap_backward(grad_mask, lse_dim):
    size = 3
    query, key, value = (x.unflatten(0, (size, 2)) for x in make_inputs(batch=size * 2, kv_heads=2))
    out, lse = torch.vmap(attn)(query, key, value)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)

    def function(go, gl, *rest):
        grads = attn_backward(go, gl, *rest, grad_mask=grad_mask)
        return tuple(grad for grad, asked in zip(grads, grad_mask, strict=True) if asked)

    shared = grad_lse if lse_dim == 0 else grad_lse[0]
    got = torch.vmap(function, in_dims=(0, lse_dim, 0, 0, 0, 0, 0))(grad_out, shared, query, key, value, out, lse)
    for i in range(size):
        gl = grad_lse[i if lse_dim == 0 else 0]
        want = function(grad_out[i], gl, query[i], key[i], value[i], out[i], lse[i])
        torch.testing.assert_close(tuple(x[i] for x in got), want)


def test_vmap_of_grad_through_autograd():
    """Per-sample outputs, differentiated as a batch."""
    inputs = [x.unflatten(0, (3, 2)).requires_grad_() for x in make_inputs(batch=6)]
    got = torch.autograd.grad(torch.vmap(lambda *x: attn(*x, is_causal=True)[0])(*inputs).square().sum(), inputs)
    flat = [x.detach().flatten(0, 1).requires_grad_() for x in inputs]
    want = torch.autograd.grad(attn(*flat, is_causal=True)[0].square().sum(), flat)
    torch.testing.assert_close([x.flatten(0, 1) for x in got], list(want))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "window_left": 3}])
def test_flops_are_counted_as_for_sdpa(kv_heads, options):
    inputs = make_inputs(kv_heads=kv_heads, requires_grad=True)
    with FlopCounterMode(display=False) as ours:
        attn(*inputs, **options)[0].sum().backward()
    shape = (2 * 4, 24, 24, 16)
    product = 2 * shape[0] * shape[1] * shape[2] * shape[3]
    assert ours.get_flop_counts()["Global"] == {
        torch.ops.flashbwd.attn: 2 * product,
        torch.ops.flashbwd.attn_backward: 5 * product,
    }


def test_flops_with_another_value_head_dim():
    inputs = make_inputs(v_head_dim=24, kv_len=20)
    with FlopCounterMode(display=False) as counter:
        attn(*inputs)
    assert counter.get_total_flops() == 2 * 2 * 4 * 24 * 20 * (16 + 24)
