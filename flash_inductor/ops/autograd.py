"""The derivative of ``flashbwd::attn``: one call of ``flashbwd::attn_backward``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .library import LIB, attn_backward


def _save(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]
) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.options = dict(keyword_only_inputs)
    # An output nobody differentiates gives None instead of a tensor of zeros that would be written and read.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return None, None, None
    query, key, value, out, lse = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grad_mask = [bool(needed) for needed in ctx.needs_input_grad[:3]]
    grads = attn_backward(grad_out, grad_lse, query, key, value, out, lse, **ctx.options, grad_mask=grad_mask)
    return tuple(grad if needed else None for grad, needed in zip(grads, grad_mask, strict=True))


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
