"""The two ops of library ``flashbwd``: schemas, fakes, and which code runs on which device.

    attn           forward, returns the output and the log-sum-exp of each row
    attn_backward  gradients of query, key and value from what the forward saved

What they compute is written down in :mod:`flash_inductor.reference`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import cpu, validate
from .layout import empty_like_layout

_OPTIONS = (
    "float? scale=None, bool is_causal=False, SymInt? window_left=None, SymInt? window_right=None, "
    "SymInt diagonal=0, float? softcap=None"
)
DEFAULTS: dict[str, Any] = {
    "scale": None,
    "is_causal": False,
    "window_left": None,
    "window_right": None,
    "diagonal": 0,
    "softcap": None,
}
ALL_GRADS = [True, True, True]

LIB = torch.library.Library("flashbwd", "DEF")  # module global: the registrations live as long as it does
_TAGS = (torch.Tag.pt2_compliant_tag,)
LIB.define(
    f"attn(Tensor query, Tensor key, Tensor value, *, {_OPTIONS}) -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)
LIB.define(
    "attn_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    f"*, {_OPTIONS}, bool[3] grad_mask=[True, True, True]) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    tags=_TAGS,
)
attn = torch.ops.flashbwd.attn.default
attn_backward = torch.ops.flashbwd.attn_backward.default


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64 inputs (else a backward in float64 would start from rounded numbers)."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@torch.library.register_fake("flashbwd::attn", lib=LIB)
def _attn_fake(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    validate.check_forward(query, key, value, **{**DEFAULTS, **options})
    batch, heads, q_len, _ = query.shape
    out = empty_like_layout(query, (batch, heads, q_len, value.shape[3]))
    return out, query.new_empty((batch, heads, q_len), dtype=lse_dtype(query.dtype))


@torch.library.register_fake("flashbwd::attn_backward", lib=LIB)
def _attn_backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    grad_mask: list[bool] = ALL_GRADS,
    **options: Any,
) -> tuple[Tensor, ...]:
    validate.check_backward(grad_out, grad_lse, query, key, value, out, lse, **{**DEFAULTS, **options})
    return tuple(
        empty_like_layout(x, x.shape) if wanted else x.new_empty((0,))
        for x, wanted in zip((query, key, value), grad_mask, strict=True)
    )


def _register(device_key: str, module_of: Any) -> None:
    """Register the ``forward`` and ``backward`` of the module that ``module_of()`` returns, checked before they run."""

    def forward(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        options = {**DEFAULTS, **options}  # the dispatcher drops arguments that equal their default
        validate.check_forward(query, key, value, **options)
        return module_of().forward(query, key, value, **options)

    def backward(
        grad_out: Tensor,
        grad_lse: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        options = {**DEFAULTS, "grad_mask": ALL_GRADS, **options}
        grad_mask = options.pop("grad_mask")
        tensors = (grad_out, grad_lse, query, key, value, out, lse)
        validate.check_backward(*tensors, **options)
        return module_of().backward(*tensors, **options, grad_mask=grad_mask)

    LIB.impl("attn", forward, device_key)
    LIB.impl("attn_backward", backward, device_key)


def _cuda_module() -> Any:
    from . import cuda  # imports Triton, which a CPU-only installation may lack

    return cuda


_register("CPU", lambda: cpu)
_register("CUDA", _cuda_module)
