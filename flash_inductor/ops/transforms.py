"""The op under autocast, vmap and the FLOP counter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .extras import EXTRAS
from .library import DEFAULT_GRADS, LIB, attn, attn_backward

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


# --- vmap: the mapped dim becomes part of the batch.  Where a batch entry doesn't stand for itself, because the sinks
# differ between samples, because dropout counts batch entries, or because the gradient of a bias or of sinks would be
# summed over samples, one call per sample.

_SINKS, _RNG = 3 + EXTRAS.index("sinks"), 3 + EXTRAS.index("rng_state")


def _vmap_attn(info: Any, in_dims: tuple[Any, ...], *tensors: Tensor | None, **options: Any) -> tuple[Any, Any]:
    given, dims = _pair(tensors, in_dims, 3)
    if given[_RNG] is not None or dims[_SINKS] is not None:
        return _call_for_each(attn, info.batch_size, given, dims, options)
    sizes = _sizes(given[0], dims[0], info.batch_size)
    outputs = attn(
        *(_fold(x, dim, sizes, i < 3) for i, (x, dim) in enumerate(zip(given, dims, strict=True))), **options
    )
    return tuple(_unfold(x, info.batch_size) for x in outputs), (0, 0)


def _vmap_attn_backward(
    info: Any, in_dims: tuple[Any, ...], *tensors: Tensor | None, **options: Any
) -> tuple[Any, Any]:
    given, dims = _pair(tensors, in_dims, 7)
    if any(options.get("grad_mask", DEFAULT_GRADS)[3:]) or given[4 + _RNG] is not None or dims[4 + _SINKS] is not None:
        return _call_for_each(attn_backward, info.batch_size, given, dims, options)
    sizes = _sizes(given[2], dims[2], info.batch_size)
    folded = (_fold(x, dim, sizes, i < 7) for i, (x, dim) in enumerate(zip(given, dims, strict=True)))
    grads = attn_backward(*folded, **options)
    out_dims = tuple(None if x.dim() == 1 else 0 for x in grads)  # a gradient not asked for has shape [0]
    return tuple(_unfold(x, info.batch_size) for x in grads), out_dims


def _pair(
    tensors: Sequence[Tensor | None], in_dims: Sequence[int | None], required: int
) -> tuple[list[Any], list[Any]]:
    """Tensors and their mapped dims, with the optional ones that were left out."""
    missing = [None] * (required + len(EXTRAS) - len(tensors))
    return [*tensors, *missing], [*in_dims[: len(tensors)], *missing]


def _sizes(query: Tensor, dim: int | None, samples: int) -> tuple[int, int]:
    """Number of samples and batch size of one sample."""
    return samples, query.shape[0 if dim is None or dim > 0 else 1]


def _fold(x: Tensor | None, dim: int | None, sizes: tuple[int, int], has_batch: bool) -> Tensor | None:
    """[samples, batch, ...] -> [samples * batch, ...].

    An optional tensor (not ``has_batch``) may have batch 1 for all, and keeps it if it is the same for all samples.
    """
    if x is None or (x.dim() == 1 and dim is None):
        return x
    if dim is None and not has_batch and x.shape[0] == 1:
        return x
    x = x.unsqueeze(0).expand(sizes[0], *x.shape) if dim is None else x.movedim(dim, 0)
    if not has_batch and x.shape[1] == 1:
        x = x.expand(-1, sizes[1], *x.shape[2:])
    return x.flatten(0, 1)


def _unfold(x: Tensor, size: int) -> Tensor:
    return x if x.dim() == 1 else x.unflatten(0, (size, x.shape[0] // size))


def _call_for_each(
    op: Any, size: int, tensors: Sequence[Tensor | None], dims: Sequence[int | None], options: dict[str, Any]
) -> tuple[Any, Any]:
    results = []
    for i in range(size):
        sample = [x if x is None or dim is None else x.select(dim, i) for x, dim in zip(tensors, dims, strict=True)]
        results.append(op(*sample, **options))
    return tuple(torch.stack(column) for column in zip(*results, strict=True)), (0,) * len(results[0])


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
