"""ATen's cuDNN and flash attention as kernels of our op: their calls with what they need and we don't have made up.

Both give a natural-log lse like ours, so that any forward goes with any backward.  ``ops.choice`` knows which problems
they compute exactly as the op is defined.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import dense_strides

_aten = torch.ops.aten
Outputs = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


def cudnn_forward(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> Outputs:
    """out in the layout ATen gives it, and lse fp32 [B, Hq, Nq]."""
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention.default(
        query, key, value, None, True, 0.0, is_causal, False, scale=scale
    )
    return out, lse.view(out.shape[:3])  # [B, Hq, Nq, 1]


def flash_forward(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> Outputs:
    """The same with FlashAttention-2."""
    out, lse, *_ = _aten._scaled_dot_product_flash_attention.default(
        query, key, value, 0.0, is_causal, False, scale=scale
    )
    return out, lse


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> Gradients:
    """The gradients of query, key and value in the layouts ATen gives them.

    Deterministic if torch.use_deterministic_algorithms asks for it.
    """
    state = query.new_empty(2, dtype=torch.uint64)  # of a dropout that isn't there
    return _aten._scaled_dot_product_flash_attention_backward.default(
        grad_out, query, key, value, out, lse, None, None,
        query.shape[2], key.shape[2], 0.0, is_causal, state, state[0], scale=scale,
    )  # fmt: skip


def cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> Gradients:
    """The same with cuDNN; never deterministic.

    torch keeps a plan for each combination of sizes, strides of query, key and value, and dropout, but not of out and
    grad_out, and reads these as they lay when the plan was made: wrong gradients where they lie otherwise (found on an
    H200 with torch 2.11).  Here both always lie as query does, and no other call shares a plan: combinations are
    compared byte by byte, and a dropout of -0.0, which is none, isn't 0.0 then.
    """
    strides = dense_strides(query.stride(), query.shape, out.shape)
    state = query.new_empty(1, dtype=torch.int64)  # of a dropout that isn't there
    return _aten._scaled_dot_product_cudnn_attention_backward.default(
        _lying(grad_out, strides), query, key, value, _lying(out, strides), lse.unsqueeze(3), state, state, None, None,
        None, query.shape[2], key.shape[2], -0.0, is_causal, scale=scale,
    )  # fmt: skip


def _lying(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    return x if x.stride() == strides else x.new_empty_strided(x.shape, strides).copy_(x)


FORWARD = {"cudnn": cudnn_forward, "flash": flash_forward}
BACKWARD = {"cudnn": cudnn_backward, "flash": flash_backward}
