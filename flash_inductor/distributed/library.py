"""The ops ``flashbwd::context_attn`` and its backward: a rank's part of attention over a sequence that ranks share.

One op, not a graph of collectives and attention: what is on its way while what is computed must not be left to the
order that a compiler finds, which may even differ between ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._compat import groups
from ..ops import autograd, empty_like_layout, validate
from ..ops.library import LIB, lse_dtype
from ..spec import MaskSpec
from . import agree, run
from .cost import choose
from .layout import local_length
from .plan import Plan, Sequence, make_plan

_OPTIONS = (
    "str group, SymInt length, str layout, str method, float? scale=None, bool is_causal=False, "
    "SymInt? window_left=None, SymInt? window_right=None, float? softcap=None"
)
_RUN_OPTIONS = ("scale", "softcap")
_INPUTS = ("query", "key", "value")
# Which kernels run, and that ranks ask each other once, is decided in the call: nothing to record in a CUDA graph.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
LIB.define(
    f"context_attn(Tensor query, Tensor key, Tensor value, *, {_OPTIONS}) -> (Tensor out, Tensor lse)", tags=_TAGS
)
LIB.define(
    "context_attn_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
    f"Tensor lse, *, {_OPTIONS}, bool[3] grad_mask) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    tags=_TAGS,
)
context_attn = torch.ops.flashbwd.context_attn.default
context_attn_backward = torch.ops.flashbwd.context_attn_backward.default


@torch.library.register_fake("flashbwd::context_attn", lib=LIB)
def _fake(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    _check(query, key, value, options)
    batch, heads, rows, _ = query.shape
    out = empty_like_layout(query, (batch, heads, rows, value.shape[3]))
    return out, query.new_empty((batch, heads, rows), dtype=lse_dtype(query.dtype))


@torch.library.register_fake("flashbwd::context_attn_backward", lib=LIB)
def _backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    **options: Any,
) -> tuple[Tensor, ...]:
    pairs = zip((query, key, value), options["grad_mask"], strict=True)
    return tuple(empty_like_layout(x, x.shape) if wanted else x.new_empty((0,)) for x, wanted in pairs)


def _check(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> None:
    """Raise what the op raises for tensors and options that it doesn't take."""
    mine: dict[str, Any] = {name: options.get(name) for name in ("scale", "window_left", "window_right", "softcap")}
    validate.check_forward(query, key, value, is_causal=options.get("is_causal", False), diagonal=0, **mine)


def _plan(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], grad_mask: tuple[bool, ...] = ()
) -> tuple[Plan, Any]:
    group = groups.by_name(options["group"])
    agree.check(group, options["group"], _common(query, key, value, options, grad_mask))
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    length, layout, method = options["length"], options["layout"], options["method"]
    wanted = local_length(length, ranks, rank, layout)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.shape[2] != wanted:
            raise ValueError(
                f"{name}: expected {wanted} positions, the share of rank {rank} of {ranks} of a sequence of {length} "
                f"in layout {layout!r}, got {x.shape[2]}; split it with ContextParallel.shard and pass length="
            )
    band = MaskSpec.from_window(
        options.get("is_causal", False), options.get("window_left"), options.get("window_right")
    )
    sequence = Sequence(length, ranks, layout, band)
    if method == "auto":
        method = choose(sequence, query.shape, key.shape, value.shape, query.element_size(), query.device.type)
    return make_plan(sequence, rank, method, backward=bool(grad_mask)), group


def _common(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], grad_mask: tuple[bool, ...]
) -> dict[str, Any]:
    """What must be the same on all ranks: all but the number of positions."""
    found = {name: x for name, x in options.items() if name not in ("group", "grad_mask")}
    for name, x in (("query", query), ("key", key), ("value", value)):
        found[f"{name} [batch, heads, head dim]"] = (x.shape[0], x.shape[1], x.shape[3])
    return {**found, "dtype": query.dtype, "gradients asked for": grad_mask}


def _forward(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    _check(query, key, value, options)
    plan, group = _plan(query, key, value, options)
    return run.forward(plan, group, query, key, value, **{name: options.get(name) for name in _RUN_OPTIONS})


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    **options: Any,
) -> tuple[Tensor, ...]:
    plan, group = _plan(query, key, value, options, tuple(options["grad_mask"]))
    grads = run.backward(
        plan, group, grad_out, grad_lse, query, key, value, out, lse, tuple(options["grad_mask"]),
        **{name: options.get(name) for name in _RUN_OPTIONS},
    )  # fmt: skip
    return tuple(query.new_empty((0,)) if grad is None else grad for grad in grads)


for _name, _implementation in (("context_attn", _forward), ("context_attn_backward", _backward)):
    LIB.impl(_name, _implementation, "CPU")
    LIB.impl(_name, _implementation, "CUDA")
autograd.register(
    context_attn, context_attn_backward, _INPUTS, _INPUTS, "compute this attention with torch operations, on one rank"
)
