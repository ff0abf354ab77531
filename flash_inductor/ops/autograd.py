"""The derivative of an attention op: one call of its backward op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._compat import functorch
from .extras import EXTRAS
from .library import LIB, attn, attn_backward

_REMEDY = "compute this attention with torch operations, without flash_inductor.enable()"


def register(op: Any, op_backward: Any, inputs: tuple[str, ...], differentiable: tuple[str, ...], remedy: str) -> None:
    """Make ``op(query, key, value, ...) -> (out, lse)`` differentiable by ``op_backward``, once.

    ``inputs`` names the tensors in their order, ``differentiable`` those that ``grad_mask`` of the backward asks for,
    in its order.  ``remedy`` says in errors what to do for other derivatives.
    """

    def save(ctx: Any, tensors: tuple[Any, ...], options: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*tensors, *output)
        # The backward chooses its kernel for itself: what is fastest forward need not even exist backward.
        ctx.options = {name: value for name, value in options.items() if name != "kernel_name"}
        # An output nobody differentiates gives None instead of a tensor of zeros that would be written and read.
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        if grad_out is None and grad_lse is None:
            return (None,) * len(tensors)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        needed = dict(zip(inputs, ctx.needs_input_grad[2:], strict=False))  # trailing arguments may have been left out
        mask = [bool(needed.get(name)) for name in differentiable]
        grads = op_backward(grad_out, grad_lse, *tensors[:3], out, lse, *tensors[3:], **ctx.options, grad_mask=mask)
        found = {name: grad for name, grad, asked in zip(differentiable, grads, mask, strict=True) if asked}
        return tuple(found.get(name) for name in inputs[: len(tensors)])

    def save_nothing(ctx: Any, tensors: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        pass

    def no_double_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(
            f"{op.name()}: double backward is not supported (create_graph=True went through attention); "
            f"where you need second derivatives, {remedy}"
        )

    _register(op, save, backward, remedy)
    # Without one, autograd would take the gradients for constants and only warn.
    _register(op_backward, save_nothing, no_double_backward, remedy)


def _register(
    op: Any, save: Callable[..., None], backward: Callable[..., tuple[Tensor | None, ...]], remedy: str
) -> None:
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
                f"or {remedy}"
            )
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            return functorch.apply(function, keys, options, *inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keys & torch._C._after_autograd_keyset, *inputs, **options)

    LIB.impl(op.name().split("::")[1], autograd, "Autograd", with_keyset=True)


register(attn, attn_backward, ("query", "key", "value", *EXTRAS), ("query", "key", "value", "bias", "sinks"), _REMEDY)
