"""Which kernel computes a problem on a CUDA device: what each takes, and which of those is the fastest.

Eager calls and the lowering ask here, so that they run the same code.  Nothing here touches a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .. import support
from ..config import get_config
from ..kernels.choices import KERNELS, Band, Kind, order
from ..spec import AttentionSpec, MaskSpec
from . import tuned

_SHORTEST_CUDNN = 64  # cuDNN has had no plan for some shorter lengths
_OLDEST_CUDNN = 90_500
_LATENT = (192, 128)  # head dims of multi-head latent attention
_OLDEST_CUDNN_LATENT = 91_900  # older ones weren't tried
_16_BIT = (torch.bfloat16, torch.float16)


class Problem(NamedTuple):
    """All that the choice depends on, in plain numbers.

    ``lengths`` (queries, keys) and ``pairs`` (of a query and a key, in all batch entries and heads) only rank kernels:
    what isn't known may be a guess.  ``band`` and ``square`` have to hold: "full" that nothing is hidden, "causal" that
    only a right bound is left, square that this is SDPA's causal, from the corner of as many keys as queries.
    ``capability`` is major * 10 + minor.
    """

    kind: Kind
    capability: int
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    lengths: tuple[int, int]
    band: Band
    square: bool = False
    scale: float | None = None
    softcap: bool = False
    extras: bool = False  # optional tensors or dropout
    grad_lse: bool = False
    deterministic: bool = False
    pairs: float = math.inf


def classify(mask: MaskSpec, q_len: Any, kv_len: Any, *, same_length: bool) -> tuple[Band, bool]:
    """``band`` and ``square`` of a problem; lengths may be symbols, of which nothing is asked."""
    mask = support.effective_mask(mask, q_len, kv_len)
    if mask.lower is not None:
        return "window", False
    if mask.upper is None:
        return "full", False
    return "causal", same_length and isinstance(mask.upper, int) and mask.upper == 0


def refusal(kernel: str, p: Problem) -> str | None:
    """Why a kernel doesn't take a problem; None if it does."""
    if kernel == "triton":
        return None
    if p.extras:
        return "it knows no bias, mask, segments, sinks and dropout"
    if kernel == "gluon":
        scale = 1.0 / math.sqrt(p.head_dim) if p.scale is None else p.scale
        taken = _gluon_takes(p.kind, p.head_dim, p.v_head_dim, p.dtype, p.capability, scale)
        return None if taken else "it takes 16-bit inputs on compute capability 9.0 with a positive scale"
    return _aten_refusal(kernel, p)


def _aten_refusal(kernel: str, p: Problem) -> str | None:
    """ATen's kernels are asked for what they define exactly as the op does."""
    widest = max(p.head_dim, p.v_head_dim)
    if p.dtype not in _16_BIT:
        return "it takes bfloat16 and float16"
    if p.softcap or not (p.band == "full" or p.square):
        return "it knows full and causal attention (of as many keys as queries) without a softcap"
    if p.scale is not None and p.scale <= 0:
        return "it takes a positive scale"
    equal = p.head_dim == p.v_head_dim and p.head_dim % 8 == 0 and widest <= 256
    if kernel == "flash" and not equal:
        return "it takes equal head dims, multiples of 8 up to 256"
    if p.grad_lse:
        return "its backward knows no gradient of lse"
    if kernel == "flash":
        # Above 192 the backward of sm_86 and its like lacks shared memory.
        taken = p.capability >= 80 and (widest <= 192 or p.capability in (80, 90, 100))
        return None if taken else "it needs compute capability 8.0, for head dims above 192 exactly 8.0, 9.0 or 10.0"
    if p.kind == "bwd" and p.deterministic:
        return "its backward sums in no fixed order"
    if not (p.capability // 10 == 9 or (p.capability // 10 == 10 and widest <= 128)) or _cudnn() < _OLDEST_CUDNN:
        return "it needs cuDNN 9.5 and compute capability 9.0, or 10.0 for head dims up to 128"
    if not equal and ((p.head_dim, p.v_head_dim) != _LATENT or _cudnn() < _OLDEST_CUDNN_LATENT):
        return "it takes equal head dims, multiples of 8 up to 256, and from cuDNN 9.19 on 192 with 128"
    return None


def eligible(p: Problem) -> tuple[str, ...]:
    """The kernels that take a problem; "triton" always does."""
    return tuple(kernel for kernel in KERNELS if fits(kernel, p))


def fits(kernel: str, p: Problem) -> bool:
    """Whether a kernel takes a problem of these very lengths."""
    return not (kernel == "cudnn" and min(p.lengths) < _SHORTEST_CUDNN) and refusal(kernel, p) is None


@lru_cache(maxsize=4096)
def choose(p: Problem, forced: str = "auto", table: tuned.Table = tuned.NONE) -> str:
    """The fastest kernel by the user's ``table``, then by the package's.

    ``forced`` (``Config.kernel``) instead where it takes the problem.
    """
    if 0 in p.lengths:
        return "triton"
    features = (p.kind, (p.head_dim, p.v_head_dim), p.band, p.lengths[1], p.softcap, p.pairs)
    ranked = (*table.order(p.capability, *features), *order(p.capability // 10, *features))
    return next(kernel for kernel in (forced, *ranked) if kernel != "auto" and fits(kernel, p))


def of_site(
    spec: AttentionSpec,
    q_shape: Sequence[Any],
    k_shape: Sequence[Any],
    v_shape: Sequence[Any],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[str, str]:
    """The kernels of forward and backward of a matched site, for reports: what it runs as without max_autotune."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "triton", "triton"
    q_len, kv_len = q_shape[2], k_shape[2]
    band, square = classify(spec.mask, q_len, kv_len, same_length=_symbol(q_len) == _symbol(kv_len))
    problem = Problem(
        "fwd",
        device_limits(device.index or 0)[0],
        dtype,
        q_shape[3],
        v_shape[3],
        (_guess(q_len), _guess(kv_len)),
        band,
        square,
        spec.scale,
        spec.softcap is not None,
        bool(spec.extras),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        pairs=math.prod(map(_guess, (*q_shape[:3], kv_len))),
    )
    how = get_config().kernel, tuned.current()
    return choose(problem, *how), choose(problem._replace(kind="bwd"), *how)


def _symbol(size: Any) -> Any:
    """Something to compare sizes by, without a guard."""
    return size if isinstance(size, int) else size.node.expr


def _guess(size: Any) -> int:
    """The number behind a symbol, without a guard."""
    hint = size if isinstance(size, int) else size.node.hint
    return hint if isinstance(hint, int) else 4096


@lru_cache
def device_limits(index: int) -> tuple[int, int | None]:
    """(compute capability, shared memory bytes a block may use) of a CUDA device."""
    props = torch.cuda.get_device_properties(index)
    return props.major * 10 + props.minor, getattr(props, "shared_memory_per_block_optin", None)


@lru_cache
def _cudnn() -> int:
    return torch.backends.cudnn.version() or 0


@lru_cache
def _gluon_takes(kind: Kind, head_dim: int, v_head_dim: int, dtype: torch.dtype, capability: int, scale: float) -> bool:
    try:
        from . import hopper, hopper_backward  # noqa: F401 - both or none
    except ImportError:  # a Triton without Gluon
        return False
    return hopper.takes(kind, head_dim, v_head_dim, dtype, capability, scale)
