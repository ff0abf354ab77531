"""Launches the Triton kernels on CUDA tensors, or on CPU tensors under TRITON_INTERPRET=1, for tests."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from ..kernels.backward import grad_key_value_kernel, grad_query_kernel
from ..kernels.configs import Config, Kind
from ..kernels.forward import forward_kernel
from ..kernels.grad_bias import CHUNK, grad_bias_kernel
from ..spec import MaskSpec
from .choice import device_limits
from .cuda_features import pack, pair_bytes
from .extras import Extras
from .layout import empty_like_layout
from .ranges import block_ranges, is_padding
from .tiles import tile_configs


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    diagonal: int = 0,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    config: Config | None = None,
    **tensors: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``flashbwd::attn`` on CUDA tensors: out [B, Hq, Nq, Dv] in query's dtype and layout, lse fp32 [B, Hq, Nq].

    fp16, bf16 or fp32; head dims up to 256.  ``tensors`` are the optional tensors of the op by name, ``config``
    overrides the tuning table.  Arguments are taken as valid.
    """
    batch, heads, q_len, _ = query.shape
    out = empty_like_layout(query, (batch, heads, q_len, value.shape[3]))
    query, key, value = map(_last_dim_contiguous, (query, key, value))
    lse = query.new_empty((batch, heads, q_len), dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    mask = MaskSpec.from_window(is_causal, window_left, window_right, diagonal)
    sizes, constants = _arguments(query, key, value, mask, scale, softcap)
    extras = _with_ranges(Extras(**tensors), q_len, value.shape[2])
    feats, chosen = pack(extras, heads, dropout_p, extras.key_range, with_sinks=True)
    c = config or _configs("fwd", query, value, pair_bytes(extras, dropout_p))[0]
    with on_device(query):
        forward_kernel[(triton.cdiv(q_len, c.block_m) * batch * heads,)](
            query, key, value, out, lse,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3], *sizes, feats,
            **constants, **_meta(c), NEGATIVE_SCALE=(scale or 0.0) < 0, FEATURES=chosen,
            ALIGN=_align(query, key, value, out),
        )  # fmt: skip
    return out, lse


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    diagonal: int = 0,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    grad_mask: Sequence[bool] = (True, True, True, False, False),
    dq_config: Config | None = None,
    dkdv_config: Config | None = None,
    dbias_config: Config | None = None,
    **tensors: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and bias on CUDA tensors, deterministic; shape [0] where ``grad_mask`` is False.

    ``flashbwd::attn_backward`` but for the gradient of the sinks, which is the same on every device.
    """
    want_query, want_key, want_value, want_bias = grad_mask[:4]
    extras = Extras(**tensors)
    # The second kernel writes both of its results: one that isn't wanted is a scratch tensor the caller never sees.
    compute = (want_query, want_key or want_value, want_key or want_value)
    grad_query, grad_key, grad_value = (
        empty_like_layout(x, x.shape) if needed else x.new_empty(0)
        for x, needed in zip((query, key, value), compute, strict=True)
    )
    grad_bias = query.new_empty(0)
    if want_bias and extras.bias is not None:
        grad_bias = empty_like_layout(extras.bias, extras.bias.shape)

    def asked() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wanted = ((grad_query, want_query), (grad_key, want_key), (grad_value, want_value))
        return (*(grad if want else grad.new_empty(0) for grad, want in wanted), grad_bias)  # type: ignore[return-value]

    grad_out, query, key, value = map(_last_dim_contiguous, (grad_out, query, key, value))
    batch, heads, q_len, _ = query.shape
    kv_heads, kv_len = key.shape[1:3]
    if batch * heads * q_len == 0 or batch * kv_heads * kv_len == 0:
        for grad in (grad_query, grad_key, grad_value, grad_bias):
            grad.zero_()
        return asked()
    delta = (grad_out.float() * out.float()).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    delta, lse = delta.contiguous(), lse.contiguous()
    mask = MaskSpec.from_window(is_causal, window_left, window_right, diagonal)
    sizes, constants = _arguments(query, key, value, mask, scale, softcap)
    extras = _with_ranges(extras, q_len, kv_len)
    inputs = (grad_out, query, key, value)
    strides = [s for x in inputs for s in x.stride()[:3]]
    extra_bytes = pair_bytes(extras, dropout_p)
    with on_device(query):
        if want_query:
            c = dq_config or _configs("dq", query, value, extra_bytes)[0]
            feats, chosen = pack(extras, heads, dropout_p, extras.key_range)
            grad_query_kernel[(triton.cdiv(q_len, c.block_m) * batch * heads,)](
                *inputs, lse, delta, grad_query, *strides, *grad_query.stride()[:3], *sizes, feats,
                **constants, **_meta(c), FEATURES=chosen, ALIGN=_align(*inputs, grad_query),
            )  # fmt: skip
        if want_key or want_value:
            c = dkdv_config or _configs("dkdv", query, value, extra_bytes)[0]
            feats, chosen = pack(extras, heads, dropout_p, extras.query_range)
            grad_key_value_kernel[(triton.cdiv(kv_len, c.block_n) * batch * kv_heads,)](
                *inputs, lse, delta, grad_key, grad_value, *strides, *grad_key.stride()[:3], *grad_value.stride()[:3],
                *sizes, feats, **constants, **_meta(c), FEATURES=chosen, ALIGN=_align(*inputs, grad_key, grad_value),
            )  # fmt: skip
        if want_bias and extras.bias is not None:
            c = dbias_config or _configs("dbias", query, value, extra_bytes)[0]
            _grad_bias(grad_bias, inputs, (lse, delta), sizes, constants, c, pack(extras, heads, dropout_p, None))
    return asked()


def _grad_bias(
    grad_bias: Tensor,
    inputs: tuple[Tensor, ...],
    rows: tuple[Tensor, Tensor],
    sizes: list[int | float],
    constants: dict[str, Any],
    c: Config,
    packed: tuple[Any, int],
) -> None:
    """Fill ``grad_bias``: sums over what the bias is broadcast over."""
    batches, heads, rows_of_bias, columns_of_bias = grad_bias.shape
    sum_rows, sum_cols = rows_of_bias == 1, columns_of_bias == 1
    (batch, all_heads, q_len, _), kv_len = inputs[1].shape, inputs[2].shape[2]
    blocks_m = triton.cdiv(q_len, CHUNK if sum_rows else c.block_m)
    blocks_n = triton.cdiv(kv_len, CHUNK if sum_cols else c.block_n)
    target = grad_bias
    if sum_rows or sum_cols:  # a partial sum for each chunk of what is summed
        shape = (blocks_m if sum_rows else q_len, blocks_n if sum_cols else kv_len)
        target = grad_bias.new_empty((batches, heads, *shape), dtype=torch.float32)
    feats, chosen = packed
    grad_bias_kernel[(batches * heads * blocks_m * blocks_n,)](
        *inputs, *rows, target, *(s for x in inputs for s in x.stride()[:3]), *target.stride(),
        batch // batches, all_heads // heads, heads, *sizes, feats, **constants, **_meta(c),
        FEATURES=chosen, SUM_ROWS=sum_rows, SUM_COLS=sum_cols, CHUNK=CHUNK, ALIGN=_align(*inputs),
    )  # fmt: skip
    if target is not grad_bias:
        summed = [dim for dim, is_summed in ((2, sum_rows), (3, sum_cols)) if is_summed]
        grad_bias.copy_(target.sum(summed, keepdim=True))


def _with_ranges(extras: Extras, q_len: int, kv_len: int) -> Extras:
    """With ranges of visible blocks, if they can be less than everything and the caller gave none."""
    if extras.key_range is not None or (extras.query_segments is None and not is_padding(extras.mask)):
        return extras
    key_range, query_range = block_ranges(extras.mask, extras.query_segments, extras.key_segments, q_len, kv_len)
    return replace(extras, key_range=key_range, query_range=query_range)


def _last_dim_contiguous(x: Tensor) -> Tensor:
    """x itself unless its last dim is strided: any other stride, 0 included, the kernels take as it is."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launches inside go to the device of ``x``."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(x.device)


_HERE = contextlib.nullcontext()


def _align(*tensors: Tensor) -> int:
    """8 if that divides every batch and head stride, so that 16-byte loads of 16-bit elements are possible, else 1."""
    return 8 if all(s % 8 == 0 for x in tensors for s in x.stride()[:2]) else 1


def _meta(c: Config) -> dict[str, int]:
    return {"BLOCK_M": c.block_m, "BLOCK_N": c.block_n, "num_warps": c.num_warps, "num_stages": c.num_stages}


def block_dim(dim: int) -> int:
    """The width of the tile that holds a head dim: the next power of two, at least 16 (tl.dot's minimum)."""
    return max(16, triton.next_power_of_2(dim))


def _configs(kind: Kind, query: Tensor, value: Tensor, extra_bytes: int) -> tuple[Config, ...]:
    capability, limit = device_limits(query.device.index) if query.is_cuda else (0, None)
    blocks = block_dim(query.shape[3]), block_dim(value.shape[3])
    return tile_configs(kind, capability, *blocks, query.element_size(), limit, extra_bytes)


def dot_precision(dtype: torch.dtype) -> str:
    """tl.dot's input_precision: for fp32 what torch.set_float32_matmul_precision asks of every other matmul."""
    if dtype is torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return "ieee"
    return "tf32"


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, mask: MaskSpec, scale: float | None, softcap: float | None
) -> tuple[list[int | float], dict[str, Any]]:
    """The scalars and constexprs that all kernels share."""
    heads, q_len, head_dim = query.shape[1:]
    kv_len, v_head_dim = value.shape[2:]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    # int32 holds every bound that matters: |j - i| is below the longer length.
    lower = 0 if mask.lower is None else max(-q_len, min(kv_len, mask.lower))
    upper = 0 if mask.upper is None else max(-q_len, min(kv_len, mask.upper))
    sizes = [heads, heads // key.shape[1], q_len, kv_len, lower, upper, float(scale), float(softcap or 0.0)]
    constants = {
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "BLOCK_D": block_dim(head_dim),
        "BLOCK_DV": block_dim(v_head_dim),
        "HAS_LOWER": mask.lower is not None,
        "HAS_UPPER": mask.upper is not None,
        "SOFTCAP": softcap is not None,
        "PRECISION": dot_precision(query.dtype),
        "FAST_TANH": query.dtype is torch.bfloat16 and query.is_cuda,
    }
    return sizes, constants
