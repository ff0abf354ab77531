"""The derivative of ``flashbwd::attn``: one call of ``flashbwd::attn_backward``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .extras import EXTRAS
from .library import LIB, attn_backward

_INPUTS = ("query", "key", "value", *EXTRAS)
_DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")  # in the order of grad_mask


def _save(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]
) -> None:
    ctx.save_for_backward(*inputs, *output)
    # The backward chooses its kernel for itself: what is fastest forward need not even exist backward.
    ctx.options = {name: value for name, value in keyword_only_inputs.items() if name != "kernel_name"}
    # An output nobody differentiates gives None instead of a tensor of zeros that would be written and read.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return (None,) * len(_INPUTS)
    *inputs, out, lse = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    needed = dict(zip(_INPUTS, ctx.needs_input_grad, strict=False))  # trailing arguments may have been left out
    grad_mask = [bool(needed.get(name)) for name in _DIFFERENTIABLE]
    grads = attn_backward(grad_out, grad_lse, *inputs[:3], out, lse, *inputs[3:], **ctx.options, grad_mask=grad_mask)
    found = {name: grad for name, grad, asked in zip(_DIFFERENTIABLE, grads, grad_mask, strict=True) if asked}
    return tuple(found.get(name) for name in _INPUTS)


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    pass


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> None:
    raise NotImplementedError(
        "flashbwd::attn: double backward is not supported (create_graph=True went through attention); "
        "where you need second derivatives, compute this attention with torch operations, "
        "without flash_inductor.enable()"
    )


torch.library.register_autograd("flashbwd::attn", _backward, setup_context=_save, lib=LIB)
# Without one, autograd would take the gradients for constants and only warn.
torch.library.register_autograd("flashbwd::attn_backward", _no_double_backward, setup_context=_save_nothing, lib=LIB)
