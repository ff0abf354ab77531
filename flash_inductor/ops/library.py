"""The ops of library ``flashbwd``: schemas, fakes, and which code runs on which device.

    attn           forward, returns the output and the log-sum-exp of each row
    attn_backward  gradients from what the forward saved; any ``kernel_name``, whichever the forward ran
    block_ranges   which blocks of keys and queries a mask or segments let meet

What they compute is written down in :mod:`flash_inductor.reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ..config import get_config
from ..kernels.choices import Kind
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
def attn_fake(
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


def _settings() -> tuple[Any, ...]:
    """What the choice of a kernel depends on, besides the call."""
    config = get_config()
    return config.kernel, config.table, torch.are_deterministic_algorithms_enabled()


class _Calls:
    """What computes calls without optional tensors, by all that it depends on but the tensors' contents and places.

    Checking and choosing take longer than all else before a launch, so they are done once for each kind of call.
    """

    most = 1 << 12

    def __init__(self, kind: Kind, prepare: Callable[..., Callable[..., Any]]) -> None:
        self.kind: Kind = kind
        self.prepare = prepare
        self.known: dict[Any, Callable[..., Any]] = {}

    def __call__(self, tensors: Sequence[Tensor | None], options: dict[str, Any]) -> Callable[..., Any]:
        """``options`` with lists as tuples.  Raises what the checks raise."""
        signature = (
            *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors],
            *options.items(),
            *_settings(),
        )
        call = self.known.get(signature)
        if call is None:
            options = _complete(self.kind, options)
            _CHECKS[self.kind](*tensors, extras=NO_EXTRAS, **options)
            call = self.prepare(self.kind, tensors, options)
            if len(self.known) >= self.most:
                self.known.clear()
            self.known[signature] = call
        return call


class Site:
    """A call in generated code, whose tensors have the same shapes, strides, dtypes and device each time.

    Called like the op, without optional tensors; another time it asks for nothing but the settings.
    """

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls
        self._known: tuple[Any, Callable[..., Any]] | None = None

    def __call__(self, *tensors: Tensor | None, **options: Any) -> Any:
        settings = _settings()
        known = self._known
        if known is None or known[0] != settings:
            if "grad_mask" in options:
                options["grad_mask"] = tuple(options["grad_mask"])
            known = self._known = settings, self._calls(tensors, options)
        results = known[1](*tensors)
        return (*results, results[3]) if self._calls.kind == "bwd" else results  # no gradient of sinks either


_CHECKS: dict[Kind, Callable[..., None]] = {"fwd": validate.check_forward, "bwd": validate.check_backward}


def _complete(kind: Kind, options: dict[str, Any]) -> dict[str, Any]:
    """With the arguments that the dispatcher dropped because they equal their default."""
    return {**DEFAULTS, **options} if kind == "fwd" else {**DEFAULTS, "grad_mask": DEFAULT_GRADS, **options}


def _register(
    device_key: str, prepare: Callable[..., Callable[..., Any]]
) -> tuple[tuple[Callable[..., Any], Callable[[str], Site]], ...]:
    """Register both ops for a device; ``prepare(kind, tensors, options)`` gives what computes a checked call.

    Returns, for each op, what it registers, and the call sites of generated code by name.

    It gets the optional tensors that are given among the options.  A backward returns the gradients of query, key,
    value and bias; that of the sinks is the same on every device.
    """
    calls = {kind: _Calls(kind, prepare) for kind in _CHECKS}

    def run(kind: Kind, given: tuple[Tensor | None, ...], extras: Extras, options: dict[str, Any]) -> Any:
        if extras is NO_EXTRAS:
            return calls[kind](given, options)(*given)
        options = _complete(kind, options)
        _CHECKS[kind](*given, extras=extras, **options)
        return prepare(kind, given, {**options, **extras.given()})(*given)

    def forward(
        query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = run("fwd", (query, key, value), take_extras(tensors, options), options)
        return result

    def backward(
        grad_out: Tensor,
        grad_lse: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *tensors: Tensor | None,
        grad_mask: Sequence[bool] = DEFAULT_GRADS,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        options["grad_mask"] = tuple(grad_mask)
        extras = take_extras(tensors, options)
        grads = run("bwd", (grad_out, grad_lse, query, key, value, out, lse), extras, options)
        if extras.sinks is not None and grad_mask[4]:
            return (*grads, grad_sinks(grad_out, grad_lse, out, lse, extras.sinks))
        return (*grads, query.new_empty((0,)))

    LIB.impl("attn", forward, device_key)
    LIB.impl("attn_backward", backward, device_key)
    sites: dict[Kind, Callable[[str], Site]] = {kind: lru_cache(None)(partial(_site, calls[kind])) for kind in calls}
    return (forward, sites["fwd"]), (backward, sites["bwd"])


def _site(calls: _Calls, name: str) -> Site:
    return Site(calls)


def _prepare_cpu(kind: Kind, tensors: Sequence[Tensor | None], options: dict[str, Any]) -> Callable[..., Any]:
    options = {name: x for name, x in options.items() if name != "kernel_name"}  # there is no choice
    return partial(cpu.forward if kind == "fwd" else cpu.backward, **options)


def _prepare_cuda(kind: Kind, tensors: Sequence[Tensor | None], options: dict[str, Any]) -> Callable[..., Any]:
    from . import cuda  # imports Triton, which a CPU-only installation may lack

    return cuda.prepare(kind, tensors, options)


_register("CPU", _prepare_cpu)
# What compiled code calls instead of the ops: the dispatcher takes about as long as all the rest before a launch, and
# has nothing to do there, where no input is differentiated, cast or mapped.
for _op, (_on_cuda, _at_site) in zip((attn, attn_backward), _register("CUDA", _prepare_cuda), strict=True):
    setattr(_op.overloadpacket, "on_cuda", _on_cuda)  # noqa: B010 - a plain assignment is unknown to the type
    setattr(_op.overloadpacket, "at_site", _at_site)  # noqa: B010
