"""The ops of library ``flashbwd``: schemas, fakes, and which code runs on which device.

    attn           forward, returns the output and the log-sum-exp of each row
    attn_backward  gradients from what the forward saved; any ``kernel_name``, whichever the forward ran
    block_ranges   which blocks of keys and queries a mask or segments let meet

What they compute is written down in :mod:`flash_inductor.reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import cpu, validate
from .extras import NO_EXTRAS, Extras, grad_sinks, take_extras
from .layout import empty_like_layout
from .ranges import block_ranges as _block_ranges

# Positional, because torch.library.register_autograd takes no tensors by keyword.
_TENSORS = (
    "Tensor? bias=None, Tensor? mask=None, Tensor? query_segments=None, Tensor? key_segments=None, "
    "Tensor? sinks=None, Tensor? rng_state=None, Tensor? key_range=None, Tensor? query_range=None"
)
_OPTIONS = (
    "float? scale=None, bool is_causal=False, SymInt? window_left=None, SymInt? window_right=None, "
    "SymInt diagonal=0, float? softcap=None, float dropout_p=0.0, str? kernel_name=None"
)
DEFAULTS: dict[str, Any] = {
    "scale": None,
    "is_causal": False,
    "window_left": None,
    "window_right": None,
    "diagonal": 0,
    "softcap": None,
    "dropout_p": 0.0,
    "kernel_name": None,  # of kernels.choices.KERNELS, on CUDA; None for the fastest
}
DEFAULT_GRADS = [True, True, True, False, False]  # query, key, value, bias, sinks

LIB = torch.library.Library("flashbwd", "DEF")  # module global: the registrations live as long as it does
_TAGS = (torch.Tag.pt2_compliant_tag,)
LIB.define(
    f"attn(Tensor query, Tensor key, Tensor value, {_TENSORS}, *, {_OPTIONS}) -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)
LIB.define(
    "attn_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    f"{_TENSORS}, *, {_OPTIONS}, bool[5] grad_mask=[True, True, True, False, False]) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias, Tensor grad_sinks)",
    tags=_TAGS,
)
LIB.define(
    "block_ranges(Tensor? mask, Tensor? query_segments, Tensor? key_segments, SymInt q_len, SymInt kv_len) "
    "-> (Tensor key_range, Tensor query_range)",
    tags=_TAGS,
)
LIB.impl("block_ranges", _block_ranges, "CompositeImplicitAutograd")
attn = torch.ops.flashbwd.attn.default
attn_backward = torch.ops.flashbwd.attn_backward.default
block_ranges = torch.ops.flashbwd.block_ranges.default


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64 inputs (else a backward in float64 would start from rounded numbers)."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@torch.library.register_fake("flashbwd::attn", lib=LIB)
def _attn_fake(
    query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    extras = take_extras(tensors, options)
    validate.check_forward(query, key, value, extras=extras, **{**DEFAULTS, **options})
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
    *tensors: Tensor | None,
    **options: Any,
) -> tuple[Tensor, ...]:
    extras = take_extras(tensors, options)
    options = {**DEFAULTS, "grad_mask": DEFAULT_GRADS, **options}
    validate.check_backward(grad_out, grad_lse, query, key, value, out, lse, extras=extras, **options)
    inputs = (query, key, value, extras.bias, extras.sinks)
    return tuple(
        query.new_empty((0,)) if x is None or not wanted else empty_like_layout(x, x.shape)
        for x, wanted in zip(inputs, options["grad_mask"], strict=True)
    )


class _Checked:
    """Remembers which calls without optional tensors are valid: checking takes longer than all else before a launch."""

    def __init__(self, most: int = 1 << 14) -> None:
        self.most = most
        self.signatures: set[Any] = set()

    def __call__(self, check: Any, tensors: Sequence[Tensor | None], extras: Extras, options: dict[str, Any]) -> None:
        """Raise what ``check`` raises."""
        if extras is not NO_EXTRAS:
            return check(*tensors, extras=extras, **options)
        metas = [None if x is None else (x.shape, x.dtype, x.device) for x in tensors]
        # Equal means equally valid here, also of 1, 1.0 and True.
        signature = (*metas, *(tuple(x) if type(x) is list else x for x in options.values()))
        if signature not in self.signatures:
            check(*tensors, extras=extras, **options)
            if len(self.signatures) >= self.most:
                self.signatures.clear()
            self.signatures.add(signature)


def _register(device_key: str, module_of: Any, has_choice: bool) -> None:
    """Register the ``forward`` and ``backward`` of the module that ``module_of()`` returns, checked before they run.

    They get the optional tensors that are given by keyword, and ``kernel_name`` if the device has a choice of kernels.
    ``backward`` returns the gradients of query, key, value and bias; that of the sinks is the same on every device.
    """
    check_forward, check_backward = _Checked(), _Checked()

    def forward(
        query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        extras = take_extras(tensors, options)
        options = {**DEFAULTS, **options}  # the dispatcher drops arguments that equal their default
        check_forward(validate.check_forward, (query, key, value), extras, options)
        if not has_choice:
            del options["kernel_name"]
        return module_of().forward(query, key, value, **options, **extras.given())

    def backward(
        grad_out: Tensor,
        grad_lse: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *tensors: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        extras = take_extras(tensors, options)
        options = {**DEFAULTS, "grad_mask": DEFAULT_GRADS, **options}
        saved = (grad_out, grad_lse, query, key, value, out, lse)
        check_backward(validate.check_backward, saved, extras, options)
        if not has_choice:
            del options["kernel_name"]
        grads = module_of().backward(*saved, **options, **extras.given())
        if options["grad_mask"][4] and extras.sinks is not None:
            return (*grads, grad_sinks(grad_out, grad_lse, out, lse, extras.sinks))
        return (*grads, query.new_empty((0,)))

    LIB.impl("attn", forward, device_key)
    LIB.impl("attn_backward", backward, device_key)


def _cuda_module() -> Any:
    from . import cuda  # imports Triton, which a CPU-only installation may lack

    return cuda


_register("CPU", lambda: cpu, has_choice=False)
_register("CUDA", _cuda_module, has_choice=True)
