"""The derivative of ``flashbwd::attn``: one call of ``flashbwd::attn_backward``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._compat import functorch
from .extras import EXTRAS
from .library import LIB, attn, attn_backward

_INPUTS = ("query", "key", "value", *EXTRAS)
_DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")  # in the order of grad_mask


def _save(ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    # The backward chooses its kernel for itself: what is fastest forward need not even exist backward.
    ctx.options = {name: value for name, value in options.items() if name != "kernel_name"}
    # An output nobody differentiates gives None instead of a tensor of zeros that would be written and read.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, out, lse = ctx.saved_tensors
    if grad_out is None and grad_lse is None:
        return (None,) * len(inputs)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    needed = dict(zip(_INPUTS, ctx.needs_input_grad[2:], strict=False))  # trailing arguments may have been left out
    grad_mask = [bool(needed.get(name)) for name in _DIFFERENTIABLE]
    grads = attn_backward(grad_out, grad_lse, *inputs[:3], out, lse, *inputs[3:], **ctx.options, grad_mask=grad_mask)
    found = {name: grad for name, grad, asked in zip(_DIFFERENTIABLE, grads, grad_mask, strict=True) if asked}
    return tuple(found.get(name) for name in _INPUTS[: len(inputs)])


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
    pass


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    raise NotImplementedError(
        "flashbwd::attn: double backward is not supported (create_graph=True went through attention); "
        "where you need second derivatives, compute this attention with torch operations, "
        "without flash_inductor.enable()"
    )


def _register(op: Any, save: Callable[..., None], backward: Callable[..., tuple[Tensor | None, ...]]) -> None:
    """What torch.library.register_autograd does, but right under torch.func, and never silent."""

    def forward(ctx: Any, keys: Any, options: dict[str, Any], *inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = op.redispatch(keys & torch._C._after_autograd_keyset, *inputs, **options)
            save(ctx, inputs, options, output)
        return output

    def all_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *backward(ctx, *grads))

    function = type(
        f"Derivative of {op}",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(all_backward)},
    )

    def autograd(keys: Any, *inputs: Any, **options: Any) -> Any:
        if functorch.has_tangent(inputs):  # else they would silently be dropped
            raise NotImplementedError(
                f"{op.name()}: forward-mode derivatives (jvp, jacfwd, hessian) are not supported; use vjp or jacrev, "
                "or compute this attention with torch operations, without flash_inductor.enable()"
            )
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            return functorch.apply(function, keys, options, *inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keys & torch._C._after_autograd_keyset, *inputs, **options)

    LIB.impl(op.name().split("::")[1], autograd, "Autograd", with_keyset=True)


_register(attn, _save, _backward)
# Without one, autograd would take the gradients for constants and only warn.
_register(attn_backward, _save_nothing, _no_double_backward)
