"""What the kernels can do: the only capability rules of the package.

Torch-free: dtypes and devices come by name ("bfloat16", "cuda"), sizes are ints or symbols.  A symbolic size counts as
unknown and never makes a site unsupported, because comparing it would put a guard on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .spec import AttentionSpec, MaskSpec

Size = Any  # int | torch.SymInt

CPU_DTYPES = ("float64", "float32", "bfloat16", "float16")
CUDA_DTYPES = ("float32", "bfloat16", "float16")
MIN_CUDA_HEAD_DIM, MAX_CUDA_HEAD_DIM, CUDA_HEAD_DIM_STEP = 8, 256, 8


def known(size: Size) -> bool:
    """Whether a size is a plain number."""
    return isinstance(size, int)


def unsupported_reasons(
    spec: AttentionSpec,
    q_shape: Sequence[Size],
    k_shape: Sequence[Size],
    v_shape: Sequence[Size],
    dtype: str,
    device: str,
) -> list[str]:
    """Why no kernel takes these inputs, one sentence with its remedy each; empty if one does.

    Shapes are [batch, heads, length, head dim]; dtype and device type by name.
    """
    reasons = []
    for name, shape in (("query", q_shape), ("key", k_shape), ("value", v_shape)):
        if len(shape) != 4:
            reasons.append(f"{name} has {len(shape)} dims; give it four: [batch, heads, length, head dim].")
    if reasons:
        return reasons
    reasons += _head_reasons(q_shape, k_shape, v_shape)
    if device not in ("cpu", "cuda", "meta"):
        reasons.append(f"device {device} has no kernels; move the tensors to cuda or cpu.")
    dtypes = CUDA_DTYPES if device == "cuda" else CPU_DTYPES
    if dtype not in dtypes:
        cure = "cast to float32, or run on the CPU" if dtype == "float64" else f"cast to one of {', '.join(dtypes)}"
        reasons.append(f"dtype {dtype} is not supported on {device}; {cure}.")
    if device == "cuda":
        for name, size in (("query and key", q_shape[3]), ("value", v_shape[3])):
            if known(size) and not _cuda_head_dim(size):
                reasons.append(
                    f"head dim {size} of {name}: on CUDA it is a multiple of {CUDA_HEAD_DIM_STEP} from "
                    f"{MIN_CUDA_HEAD_DIM} to {MAX_CUDA_HEAD_DIM}; pad it with zeros (and pass scale=)."
                )
    return reasons


def _head_reasons(q_shape: Sequence[Size], k_shape: Sequence[Size], v_shape: Sequence[Size]) -> list[str]:
    reasons = []
    q_heads, k_heads, v_heads = q_shape[1], k_shape[1], v_shape[1]
    if known(q_heads) and known(k_heads) and (q_heads % k_heads if k_heads else q_heads):
        reasons.append(f"{q_heads} query heads are not a multiple of {k_heads} key heads; repeat or drop heads.")
    if known(k_heads) and known(v_heads) and k_heads != v_heads:
        reasons.append(f"key has {k_heads} heads and value {v_heads}; repeat the fewer so that both have the same.")
    if known(q_shape[3]) and known(k_shape[3]) and q_shape[3] != k_shape[3]:
        reasons.append(f"query has head dim {q_shape[3]} and key {k_shape[3]}; project both to the same head dim.")
    return reasons


def _cuda_head_dim(size: int) -> bool:
    return MIN_CUDA_HEAD_DIM <= size <= MAX_CUDA_HEAD_DIM and size % CUDA_HEAD_DIM_STEP == 0


def effective_mask(mask: MaskSpec, q_len: Size, kv_len: Size) -> MaskSpec:
    """The mask without bounds that hide nothing at these lengths (a window as long as the sequence, say)."""
    lower, upper = mask.lower, mask.upper
    if known(upper) and known(kv_len) and upper >= kv_len - 1:
        upper = None
    if known(lower) and known(q_len) and lower <= 1 - q_len:
        lower = None
    return MaskSpec(lower, upper)


def aten_cpu_route(
    spec: AttentionSpec, q_shape: Sequence[Size], k_shape: Sequence[Size], v_shape: Sequence[Size]
) -> bool:
    """Whether ATen's CPU flash attention computes this spec (values apart: it mishandles masked inf and NaN).

    Of the extras it is asked for key padding only: it knows no dropout and no sinks, and gives a bias no gradient.
    """
    lower, upper = spec.mask.lower, spec.mask.upper
    causal = isinstance(upper, int) and upper == 0
    return (
        spec.softcap is None
        and spec.extras in ((), ("padding",))
        and lower is None
        and (upper is None or causal)
        and (spec.scale is None or spec.scale > 0)  # it takes the maximum before scaling
        and all(known(size) for size in (q_shape[3], v_shape[3]))
        and q_shape[3] == v_shape[3] > 0
    )


def kernel_name(
    spec: AttentionSpec,
    q_shape: Sequence[Size],
    k_shape: Sequence[Size],
    v_shape: Sequence[Size],
    dtype: str,
    device: str,
    *,
    lowering: str = "template",
    capability: tuple[int, int] | None = None,
    chosen: tuple[str, str] = ("triton", "triton"),
) -> str:
    """Which kernel a supported site runs as, in words for reports.

    ``lowering`` is the setting of that name; "extern" and uncompiled calls run the eager Triton kernel.
    ``capability`` is the (major, minor) of the GPU, if known; ``chosen`` the kernels of forward and backward.
    """
    if device == "cuda":
        arch = "" if capability is None else f" (sm_{capability[0]}{capability[1]})"
        triton = "Triton templates" if lowering == "template" else "eager Triton kernel"
        names = {"triton": triton, "gluon": "Hopper Gluon kernels", "cudnn": "cuDNN", "flash": "ATen flash"}
        forward, backward = (names[name] for name in chosen)
        return (forward if forward == backward else f"{forward}, backward {backward}") + arch
    spec = replace(spec, mask=effective_mask(spec.mask, q_shape[2], k_shape[2]))
    return "ATen CPU flash" if aten_cpu_route(spec, q_shape, k_shape, v_shape) else "tiled CPU kernel"
