"""The op under autocast, vmap and the FLOP counter."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .library import LIB, attn, attn_backward

# --- autocast: torch.library.register_autocast fixes one dtype; attention takes the one that is active.


def _register_autocast(device_type: str, key_name: str) -> None:
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key_name))

    def autocast(
        query: Tensor, key_: Tensor, value: Tensor, *extras: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(device_type)
        inputs = [
            x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x for x in (query, key_, value)
        ]
        with torch._C._ExcludeDispatchKeyGuard(key):
            return attn(*inputs, *extras, **options)

    LIB.impl("attn", autocast, key_name)


_register_autocast("cpu", "AutocastCPU")
_register_autocast("cuda", "AutocastCUDA")


# --- vmap: the mapped dim becomes part of the batch.


def _fold(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    if x is None:
        return None
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _unfold(x: Tensor, size: int) -> Tensor:
    return x if x.dim() == 1 else x.unflatten(0, (size, x.shape[0] // size))


def _vmap_attn(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor, **options: Any) -> tuple[Any, Any]:
    size = info.batch_size
    outputs = attn(*(_fold(x, dim, size) for x, dim in zip(tensors, in_dims, strict=False)), **options)
    return tuple(_unfold(x, size) for x in outputs), (0, 0)


def _vmap_attn_backward(
    info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor | None, **options: Any
) -> tuple[Any, Any]:
    size = info.batch_size
    grads = attn_backward(*(_fold(x, dim, size) for x, dim in zip(tensors, in_dims, strict=False)), **options)
    dims = tuple(None if x.dim() == 1 else 0 for x in grads)  # a gradient not asked for has shape [0]
    return tuple(_unfold(x, size) for x in grads), dims


torch.library.register_vmap("flashbwd::attn", _vmap_attn, lib=LIB)
torch.library.register_vmap("flashbwd::attn_backward", _vmap_attn_backward, lib=LIB)


# --- FLOPs: as torch.utils.flop_counter counts SDPA, all N * Nk pairs whatever the mask hides, so that numbers of
# rewritten and stock graphs compare; two products forward, five backward.


def _product(q_shape: Any, k_shape: Any, width: int) -> int:
    batch, heads, q_len, _ = q_shape
    return 2 * math.prod((batch, heads, q_len, k_shape[2], width))


@register_flop_formula(torch.ops.flashbwd.attn)
def attn_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **options: Any) -> int:
    """FLOPs of the forward from the shapes of its inputs."""
    return _product(query, key, query[3]) + _product(query, key, value[3])


@register_flop_formula(torch.ops.flashbwd.attn_backward)
def attn_backward_flops(
    grad_out: Any, grad_lse: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **options: Any
) -> int:
    """FLOPs of the backward; all three gradients, as for SDPA, also if not all are asked for."""
    return 3 * _product(query, key, query[3]) + 2 * _product(query, key, value[3])
