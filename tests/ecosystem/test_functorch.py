"""torch.func, compiled autograd, derivatives of derivatives: right, or one error that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import flash_inductor
from flash_inductor.ops import attn
from flash_inductor.report import collect

from .model import causal, make_qkv, softcapped, step

ALL = (0, 1, 2)


def op(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attn(query, key, value, is_causal=True)[0]


def user_function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return flash_inductor.attention(query, key, value, is_causal=True)


def loss_of(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs: function(*inputs).square().sum()


def samples() -> tuple[Tensor, ...]:
    """Three samples of query, key, value [2, 2, 24, 16]."""
    return tuple(torch.randn(3, 2, 2, 24, 16) for _ in range(3))


def one() -> tuple[Tensor, ...]:
    return tuple(x.detach() for x in make_qkv(24))


def per_sample(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.func.vmap(torch.func.grad(loss_of(function), argnums=ALL))


@pytest.mark.parametrize("function", [op, user_function])
def test_grad(function: Callable[..., Tensor]) -> None:
    inputs = one()
    got = torch.func.grad(loss_of(function), argnums=ALL)(*inputs)
    torch.testing.assert_close(got, torch.func.grad(loss_of(causal), argnums=ALL)(*inputs))


def test_vjp_of_both_outputs() -> None:
    inputs = one()
    (out, lse), pull = torch.func.vjp(lambda *x: attn(*x, softcap=2.0), *inputs)
    tangents = torch.randn_like(out), torch.randn_like(lse)
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(attn(*leaves, softcap=2.0), leaves, tangents)
    torch.testing.assert_close(pull(tangents), expected)


def test_jacrev() -> None:
    inputs = [x[:1, :1, :3] for x in one()]
    torch.testing.assert_close(torch.func.jacrev(op)(*inputs), torch.func.jacrev(causal)(*inputs))


def test_gradients_of_each_sample() -> None:
    inputs = samples()
    torch.testing.assert_close(per_sample(op)(*inputs), per_sample(causal)(*inputs))


def test_gradients_of_each_sample_with_a_bias() -> None:
    """The gradient of a bias isn't summed over samples: one call for each."""

    def biased(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return attn(query, key, value, bias)[0].square().sum()

    inputs, bias = samples(), torch.randn(1, 2, 24, 24)
    got = torch.func.vmap(torch.func.grad(biased, argnums=(0, 3)), in_dims=(0, 0, 0, None))(*inputs, bias)
    for i in range(3):
        leaves = [x[i].clone().requires_grad_() for x in inputs] + [bias.clone().requires_grad_()]
        expected = torch.autograd.grad(biased(*leaves), (leaves[0], leaves[3]))
        torch.testing.assert_close((got[0][i], got[1][i]), expected)


def test_an_outer_gradient_sees_an_inner_vmap() -> None:
    inputs = samples()
    got = torch.func.grad(lambda *x: torch.func.vmap(op)(*x).square().sum(), argnums=ALL)(*inputs)
    torch.testing.assert_close(got, per_sample(causal)(*inputs))


def test_only_what_is_asked_for_is_differentiated() -> None:
    """The gradients of other arguments aren't computed, and aren't asked of the kernel."""
    inputs = one()
    got = torch.func.grad(loss_of(op), argnums=1)(*inputs)
    torch.testing.assert_close(got, torch.func.grad(loss_of(causal), argnums=1)(*inputs))


@pytest.mark.parametrize("where", ["inside", "around"])
def test_the_op_compiled(where: str) -> None:
    """A transform inside compiled code, or around it (where torch runs it as eager code)."""
    inputs, backend = one(), "aot_eager"
    if where == "inside":
        got = torch.compile(torch.func.grad(loss_of(op), argnums=ALL), fullgraph=True, backend=backend)(*inputs)
    else:
        got = torch.func.grad(loss_of(torch.compile(op, backend=backend)), argnums=ALL)(*inputs)
    torch.testing.assert_close(got, torch.func.grad(loss_of(causal), argnums=ALL)(*inputs))


def test_compiled_gradients_of_each_sample() -> None:
    inputs = samples()
    got = torch.compile(per_sample(op), fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(got, per_sample(causal)(*inputs))


def test_attention_inside_a_transform_is_left_alone_and_the_reason_says_so() -> None:
    inputs = one()
    with flash_inductor.enabled(), collect() as sites:
        got = torch.compile(torch.func.grad(loss_of(causal), argnums=ALL), fullgraph=True)(*inputs)
    assert [s.replaced for s in sites] == [False]
    assert "torch.func" in (sites[0].reason or "")
    torch.testing.assert_close(got, torch.func.grad(loss_of(causal), argnums=ALL)(*inputs))


@pytest.mark.parametrize("how", ["jvp", "jacfwd", "hessian", "dual tensors"])
def test_forward_mode_is_one_clear_error(how: str) -> None:
    """Without the check, the op would drop the tangents: a derivative of 0, and nothing said."""
    inputs = [x[:1, :1, :3] for x in one()]
    with pytest.raises(NotImplementedError, match=r"forward-mode derivatives.*use vjp or jacrev"):
        if how == "jvp":
            torch.func.jvp(op, tuple(inputs), tuple(inputs))
        elif how == "jacfwd":
            torch.func.jacfwd(op)(*inputs)
        elif how == "hessian":
            torch.func.hessian(loss_of(op))(*inputs)
        else:
            with forward_ad.dual_level():
                op(forward_ad.make_dual(inputs[0], inputs[0]), *inputs[1:])


def test_forward_mode_elsewhere_is_no_error() -> None:
    inputs = one()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        torch.testing.assert_close(op(*inputs), causal(*inputs))
        assert forward_ad.unpack_dual(dual * 2).tangent.tolist() == [2, 2, 2]


def test_compiled_autograd() -> None:
    """Forward and backward as one graph."""
    inputs = make_qkv()
    expected = step(softcapped, inputs)

    @torch.compile
    def both(*inputs: Tensor) -> Tensor:
        out = softcapped(*inputs)
        out.square().mean().backward()
        return out.detach()

    with flash_inductor.enabled(), torch._dynamo.config.patch(compiled_autograd=True), collect() as sites:
        out = both(*inputs)
    assert [s.replaced for s in sites] == [True]
    torch.testing.assert_close([out, *(x.grad for x in inputs)], expected)


def test_double_backward_of_compiled_code_is_torchs_error() -> None:
    """The same error that stock gives, before the plugin's own can come."""
    inputs = make_qkv()
    with flash_inductor.enabled():
        out = torch.compile(causal)(*inputs)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            (grad,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
            grad.sum().backward()
