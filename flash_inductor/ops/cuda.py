"""Eager CUDA: chooses a kernel and launches it.

The Triton launch behind it also runs on CPU tensors under TRITON_INTERPRET=1, for tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import get_config
from ..kernels.choices import Kind
from ..spec import MaskSpec
from ..support import effective_mask
from . import aten, choice, triton_kernels
from .layout import dense_strides, empty_like_layout
from .triton_kernels import on_device

_DEFAULTS: dict[str, Any] = {
    "scale": None,
    "is_causal": False,
    "window_left": None,
    "window_right": None,
    "diagonal": 0,
    "softcap": None,
}
_WITHOUT_TENSORS = {*_DEFAULTS, "dropout_p"}


def forward(
    query: Tensor, key: Tensor, value: Tensor, *, kernel_name: str | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """``flashbwd::attn`` on CUDA tensors: out [B, Hq, Nq, Dv] in query's dtype and layout, lse fp32 [B, Hq, Nq].

    fp16, bf16 or fp32; head dims up to 256.  ``options`` are those of :func:`triton_kernels.forward`, which runs
    wherever one of them is its own (``config``, the optional tensors, dropout).  Arguments are taken as valid.

    Raises NotImplementedError if ``kernel_name`` names one that doesn't take the problem.
    """
    plan = _plan_of("fwd", (query, key, value), kernel_name, options, False)
    if plan is None or not _aligned(query, key, value):
        return triton_kernels.forward(query, key, value, **options)
    if plan.kernel == "gluon":
        from . import hopper

        shape = query.shape[:3]
        out = empty_like_layout(query, (*shape, value.shape[3]))
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
        with on_device(query):
            hopper.forward(query, key, value, out, lse, scale=plan.scale, mask=plan.mask, softcap=plan.softcap)
        return out, lse
    with on_device(query):
        out, lse = aten.FORWARD[plan.kernel](query, key, value, is_causal=plan.is_causal, scale=plan.scale)
    return _laid_out(out, query), lse


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    grad_mask: Sequence[bool] = (True, True, True, False, False),
    kernel_name: str | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and bias on CUDA tensors; shape [0] where ``grad_mask`` is False.

    ``flashbwd::attn_backward`` but for the gradient of the sinks, which is the same on every device.  ``options`` and
    errors as for :func:`forward`.
    """
    inputs = (query, key, value)
    plan = _plan_of("bwd", inputs, kernel_name, options, grad_lse is not None)
    if plan is None or not any(grad_mask[:3]) or not _aligned(grad_out, *inputs, out):
        saved = (grad_out, grad_lse, *inputs, out, lse)
        return triton_kernels.backward(*saved, grad_mask=grad_mask, **options)
    lse = lse.contiguous()
    if plan.kernel == "gluon":
        from . import hopper_backward

        grads = [empty_like_layout(x, x.shape) for x in inputs]
        if grad_lse is not None:
            grad_lse = grad_lse.contiguous()
        with on_device(query):
            hopper_backward.backward(
                grad_out, grad_lse, *inputs, out, lse, *grads,
                scale=plan.scale, mask=plan.mask, softcap=plan.softcap, deterministic=plan.deterministic,
            )  # fmt: skip
    else:
        with on_device(query):
            given = aten.BACKWARD[plan.kernel](grad_out, *inputs, out, lse, is_causal=plan.is_causal, scale=plan.scale)
        grads = [_laid_out(grad, x) for grad, x in zip(given, inputs, strict=True)]
    # All are computed together: what isn't wanted was scratch.
    grads = [grad if want else grad.new_empty(0) for grad, want in zip(grads, grad_mask, strict=False)]
    return grads[0], grads[1], grads[2], query.new_empty(0)


class Plan(NamedTuple):
    """How one problem runs, other than as Triton kernels."""

    kernel: str
    scale: float
    mask: MaskSpec  # without bounds that hide nothing
    softcap: float | None
    deterministic: bool

    @property
    def is_causal(self) -> bool:
        """What ATen's kernels, which take no other band, are told."""
        return self.mask.upper is not None


def _plan_of(
    kind: Kind, inputs: tuple[Tensor, Tensor, Tensor], kernel: str | None, options: dict[str, Any], grad_lse: bool
) -> Plan | None:
    """None for the Triton kernels."""
    query, key, value = inputs
    if kernel == "triton" or not query.is_cuda:  # or in Triton's interpreter
        return None
    if options.get("dropout_p") or any(options[name] is not None for name in options.keys() - _WITHOUT_TENSORS):
        if kernel is not None:
            raise NotImplementedError(_cannot(kernel, "it knows no bias, mask, segments, sinks and dropout"))
        return None
    plain = [options.get(name, default) for name, default in _DEFAULTS.items()]
    return _plan(
        kind, query.device.index, query.dtype, query.shape, key.shape, value.shape, *plain,
        kernel, get_config().kernel, grad_lse, torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _plan(
    kind: Kind,
    index: int,
    dtype: torch.dtype,
    q_shape: torch.Size,
    k_shape: torch.Size,
    v_shape: torch.Size,
    scale: float | None,
    is_causal: bool,
    window_left: int | None,
    window_right: int | None,
    diagonal: int,
    softcap: float | None,
    kernel: str | None,
    forced: str,
    grad_lse: bool,
    deterministic: bool,
) -> Plan | None:
    q_len, kv_len, head_dim = q_shape[2], k_shape[2], q_shape[3]
    mask = MaskSpec.from_window(is_causal, window_left, window_right, diagonal)
    band, square = choice.classify(mask, q_len, kv_len, same_length=q_len == kv_len)
    problem = choice.Problem(
        kind,
        choice.device_limits(index)[0],
        dtype,
        head_dim,
        v_shape[3],
        (q_len, kv_len),
        band,
        square,
        scale,
        softcap is not None,
        grad_lse=grad_lse,
        deterministic=deterministic,
    )
    if kernel is not None:
        reason = choice.refusal(kernel, problem._replace(deterministic=False))
        if reason is not None:
            raise NotImplementedError(_cannot(kernel, reason))
    # Compiled code names a kernel for all lengths and both modes: where it can't be that one, the table decides.
    if kernel is None or not choice.fits(kernel, problem):
        kernel = choice.choose(problem, forced)
    if kernel == "triton" or 0 in (*q_shape, *k_shape):
        return None
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    return Plan(kernel, scale, effective_mask(mask, q_len, kv_len), softcap, deterministic)


def _cannot(kernel: str, reason: str) -> str:
    return f"kernel_name: {kernel} was asked for, but {reason}; leave it None for one that can"


def _aligned(*tensors: Tensor) -> bool:
    """Whether all but the Triton kernels can read these: by TMA, or 16 bytes at once."""
    from . import hopper

    return hopper.aligned(*tensors)


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """x with the strides the op promises: a copy if ATen chose others."""
    if x.stride() == dense_strides(like.stride(), like.shape, x.shape):
        return x
    return empty_like_layout(like, x.shape).copy_(x)
