"""What the three templates need to know about one node: which arguments they take, and their compile-time constants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import support
from .._compat import inductor
from .._compat.inductor import Expr, IRNode
from ..config import get_config
from ..ops import triton_kernels as eager
from ..spec import AttentionSpec


@dataclass(frozen=True)
class Band:
    """The band as a template takes it, all numbers non-negative.

    The diagonal is ``up - down``, plus ``Nk - Nq`` (from the sizes at run time) if ``from_sizes``.
    Non-negative because Inductor's text for a choice, which it splits at every "-", garbles negative constants.
    """

    window_left: int | None
    window_right: int | None
    diagonal_up: int = 0
    diagonal_down: int = 0
    from_sizes: bool = False

    def constants(self) -> dict[str, Any]:
        return {
            "HAS_LOWER": self.window_left is not None,
            "HAS_UPPER": self.window_right is not None,
            "WINDOW_LEFT": self.window_left or 0,
            "WINDOW_RIGHT": self.window_right or 0,
            "DIAGONAL_UP": self.diagonal_up,
            "DIAGONAL_DOWN": self.diagonal_down,
            "DIAGONAL_FROM_SIZES": self.from_sizes,
        }


def band_of(
    is_causal: bool, window_left: Expr | None, window_right: Expr | None, diagonal: Expr, q_len: Expr, kv_len: Expr
) -> Band | None:
    """The band, or None if it holds a symbol other than what the lengths give."""
    if is_causal:
        window_right = 0
    distances = [None if d is None else inductor.static_int(d) for d in (window_left, window_right)]
    if any(d is None and given is not None for d, given in zip(distances, (window_left, window_right), strict=True)):
        return None
    left, right = distances
    if left is None and right is None:
        return Band(None, None)
    offset = inductor.static_int(inductor.simplify(diagonal))
    from_sizes = offset is None
    if offset is None:
        offset = inductor.static_int(inductor.simplify(diagonal - (kv_len - q_len)))
        if offset is None:
            return None
    return Band(left, right, max(0, offset), max(0, -offset), from_sizes)


def template_constants(
    query: IRNode, key: IRNode, value: IRNode, others: Sequence[IRNode], options: dict[str, Any]
) -> dict[str, Any] | None:
    """The constants of the templates for this node, or None if the node must call the op instead.

    ``others`` are further tensors that must have the dtype of query; ``options`` the op's keyword arguments.
    """
    if get_config().lowering == "extern":
        return None
    sizes = [list(x.get_size()) for x in (query, key, value)]
    heads, kv_heads, head_dim, v_head_dim = (
        inductor.static_int(size) for size in (sizes[0][1], sizes[1][1], sizes[0][3], sizes[2][3])
    )
    if heads is None or kv_heads is None or head_dim is None or v_head_dim is None:
        return None
    if any(inductor.static_int(size) == 0 for size in (*sizes[0], *sizes[1], *sizes[2])):
        return None
    if inductor.has_unbacked([*sizes[0], *sizes[1], *sizes[2]]):
        return None
    device, dtype = query.get_device(), query.get_dtype()
    if device.type != "cuda" or any(x.get_dtype() != dtype for x in (key, value, *others)):
        return None
    shapes = [
        (batch, h, length, d)
        for (batch, _, length, _), h, d in zip(
            sizes, (heads, kv_heads, kv_heads), (head_dim, head_dim, v_head_dim), strict=True
        )
    ]
    dtype_name = str(dtype).removeprefix("torch.")
    reasons = support.unsupported_reasons(AttentionSpec(), shapes[0], shapes[1], shapes[2], dtype_name, device.type)
    if reasons:
        return None
    band = band_of(
        options["is_causal"],
        options["window_left"],
        options["window_right"],
        options["diagonal"],
        sizes[0][2],
        sizes[1][2],
    )
    if band is None:
        return None
    scale, softcap = options["scale"], options["softcap"]
    return {
        **band.constants(),
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "BLOCK_D": eager.block_dim(head_dim),
        "BLOCK_DV": eager.block_dim(v_head_dim),
        "GROUP": heads // kv_heads,
        "SM_SCALE": float(1.0 / math.sqrt(head_dim) if scale is None else scale),
        "SOFTCAP": float(softcap or 0.0),
        "HAS_SOFTCAP": softcap is not None,
        "PRECISION": repr(eager.dot_precision(dtype)),  # written into the kernel's text as it is
        "FAST_TANH": dtype is torch.bfloat16,
    }
