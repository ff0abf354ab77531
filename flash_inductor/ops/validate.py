"""Every bad input gives one error that names the argument, what was expected and what came.  Nothing is computed.

Runs in the fakes too, so symbolic sizes are compared only where the op's meaning needs them equal (that merges the
symbols), never to tell long from short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import support
from ..kernels.choices import KERNELS
from ..spec import AttentionSpec, MaskSpec
from .extras import NO_EXTRAS, Extras
from .ranges import check_equal
from .validate_extras import FLOATS, check_extras, words


def check_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    is_causal: bool,
    window_left: Any,
    window_right: Any,
    diagonal: Any,
    softcap: float | None,
    dropout_p: float = 0.0,
    kernel_name: str | None = None,
    extras: Extras = NO_EXTRAS,
) -> None:
    """Raise TypeError, ValueError or NotImplementedError unless these are inputs of ``flashbwd::attn``."""
    _check_tensors(query, key, value)
    _check_options(scale, window_left, window_right, softcap)
    if kernel_name is not None and kernel_name not in KERNELS:
        names = ", ".join(KERNELS)
        raise ValueError(f"kernel_name: expected one of {names}, or None for the fastest, got {kernel_name!r}")
    check_extras(extras, query, key, dropout_p)
    spec = AttentionSpec(scale, MaskSpec.from_window(is_causal, window_left, window_right, diagonal), softcap)
    reasons = support.unsupported_reasons(
        spec, query.shape, key.shape, value.shape, str(query.dtype).removeprefix("torch."), query.device.type
    )
    if reasons:
        raise NotImplementedError("flashbwd::attn: " + " ".join(reasons))


def check_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    grad_mask: Sequence[bool],
    extras: Extras = NO_EXTRAS,
    **options: Any,
) -> None:
    """The same for ``flashbwd::attn_backward``."""
    check_forward(query, key, value, extras=extras, **options)
    if len(grad_mask) != 5:
        raise ValueError(f"grad_mask: expected 5 entries, got {len(grad_mask)}")
    for asked, name, x in ((grad_mask[3], "bias", extras.bias), (grad_mask[4], "sinks", extras.sinks)):
        if asked and x is None:
            raise ValueError(f"grad_mask: expected no gradient of {name} to be asked for, because there is no {name}")
    row_shape = query.shape[:3]
    for name, tensor, shape in (
        ("grad_out", grad_out, (*row_shape, value.shape[3])),
        ("out", out, (*row_shape, value.shape[3])),
        ("grad_lse", grad_lse, row_shape),
        ("lse", lse, row_shape),
    ):
        if tensor is None:
            continue
        if tensor.dim() != len(shape):
            raise ValueError(f"{name}: expected {len(shape)} dims {words(shape)}, got shape {words(tensor.shape)}")
        for size, expected in zip(tensor.shape, shape, strict=True):
            check_equal(size, expected, name, f"shape {words(shape)}", words(tensor.shape))


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    tensors = (("query", query), ("key", key), ("value", value))
    for name, x in tensors:
        if x.dim() != 4:
            raise ValueError(
                f"{name}: expected 4 dims [batch, heads, length, head dim], got {x.dim()} dims, shape {words(x.shape)}"
            )
        if x.dtype not in FLOATS:
            raise TypeError(f"{name}: expected a dtype of float64, float32, bfloat16 or float16, got {x.dtype}")
        if x.dtype != query.dtype:
            raise TypeError(
                f"{name}: expected {query.dtype}, the dtype of query, got {x.dtype}; "
                "cast it, or run under torch.autocast"
            )
        if x.device != query.device:
            raise ValueError(f"{name}: expected device {query.device}, that of query, got {x.device}")
    (batch, q_heads, _, head_dim), (_, k_heads, kv_len, _) = query.shape, key.shape
    check_equal(key.shape[0], batch, "key", f"batch size {batch}, that of query", key.shape[0])
    check_equal(value.shape[0], batch, "value", f"batch size {batch}, that of query", value.shape[0])
    check_equal(key.shape[3], head_dim, "key", f"head dim {head_dim}, that of query", key.shape[3])
    check_equal(value.shape[1], k_heads, "value", f"{k_heads} heads, those of key", value.shape[1])
    check_equal(value.shape[2], kv_len, "value", f"length {kv_len}, that of key", value.shape[2])
    if head_dim == 0:
        raise ValueError("query: expected a head dim of at least 1, got 0")
    if q_heads % k_heads != 0 if k_heads else q_heads != 0:
        raise ValueError(f"key: expected a number of heads that divides the {q_heads} of query, got {k_heads}")


def _check_options(scale: float | None, window_left: Any, window_right: Any, softcap: float | None) -> None:
    for name, number in (("window_left", window_left), ("window_right", window_right)):
        if isinstance(number, int) and number < 0:
            raise ValueError(f"{name}: expected a distance of at least 0, or None for unbounded, got {number}")
    if isinstance(scale, float) and not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, or None for 1 / sqrt(head dim), got {scale}")
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap: expected a positive finite number, or None for no cap, got {softcap}")
