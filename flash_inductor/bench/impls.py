"""The implementations of one attention problem that a user of PyTorch could pick, each by name.

    stock         what torch.compile makes of F.scaled_dot_product_attention with nothing forced; with a dense mask for
                  windows, and of the formula written out where there is a softcap, which SDPA has not
    eager         the formula written out, not compiled
    flash, cudnn  SDPA with that backend forced
    flex          compiled FlexAttention with its block mask
    fa3, fa4      the packages flash_attn_interface and flash_attn.cute, where they are installed
    ours          the op in a compiled graph: what a matched site becomes
    ours:NAME     the op called eagerly with ``kernel_name=NAME``

An implementation that can't do a case raises Unsupported when it is made, or refuses when it is called.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..kernels.choices import KERNELS
from .case import Case

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
BLOCK = 128  # of FlexAttention's block mask
_FILLS: Any = torch.utils.deterministic  # a module whose attributes are settings


class Unsupported(Exception):
    """The implementation has no such feature."""


def inputs(case: Case, device: str, seed: int = 0) -> list[Tensor]:
    """query, key, value and grad_out, [B, H, N, D] in the case's memory layout."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = []
    for heads, dim in (
        (case.heads, case.head_dim),
        (case.kv_heads, case.head_dim),
        (case.kv_heads, case.value_dim),
        (case.heads, case.value_dim),
    ):
        middle = (heads, case.length) if case.layout == "bhnd" else (case.length, heads)
        options: dict[str, Any] = {"device": device, "dtype": getattr(torch, case.dtype), "generator": generator}
        x = torch.randn((case.batch, *middle, dim), **options)
        tensors.append(x if case.layout == "bhnd" else x.transpose(1, 2))
    return tensors


@contextmanager
def settings(case: Case) -> Iterator[None]:
    """Deterministic algorithms for the cases that ask for them, without torch's filling of every new tensor."""
    before = torch.are_deterministic_algorithms_enabled(), _FILLS.fill_uninitialized_memory
    torch.use_deterministic_algorithms(case.deterministic)
    _FILLS.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        _FILLS.fill_uninitialized_memory = before[1]


def ours(case: Case, device: str) -> Attention:
    return torch.compile(lambda q, k, v: torch.ops.flashbwd.attn(q, k, v, **case.options)[0], dynamic=False)


class _Named(torch.autograd.Function):
    """The op with a kernel named for both directions: the op's own backward takes the fastest."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, kernel: str, options: dict[str, Any]) -> Tensor:
        out, lse = torch.ops.flashbwd.attn(query, key, value, **options, kernel_name=kernel)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.kernel, ctx.options = kernel, options
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:  # type: ignore[override]
        saved = ctx.saved_tensors
        grads = torch.ops.flashbwd.attn_backward(grad_out, None, *saved, **ctx.options, kernel_name=ctx.kernel)
        return (*grads[:3], None, None)


def ours_with(kernel: str) -> Callable[[Case, str], Attention]:
    def make(case: Case, device: str) -> Attention:
        if kernel != "triton" and device == "cpu":
            raise Unsupported("needs a GPU")
        return lambda q, k, v: _Named.apply(q, k, v, kernel, case.options)

    return make


def _sdpa(case: Case, mask: Tensor | None = None) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=case.causal and mask is None, enable_gqa=case.heads != case.kv_heads
        )

    return attention


def dense_mask(case: Case, device: str) -> Tensor | None:
    """bool [N, N], True where seen; None if everything is."""
    lower, upper = case.band
    if lower is None and upper is None:
        return None
    at = torch.arange(case.length, device=device, dtype=torch.int32)
    distance = at[None, :] - at[:, None]
    mask = torch.ones_like(distance, dtype=torch.bool)
    if lower is not None:
        mask &= distance >= lower
    if upper is not None:
        mask &= distance <= upper
    return mask


def eager(case: Case, device: str) -> Attention:
    """The formula written out, which holds all scores."""
    mask, cap, groups = dense_mask(case, device), case.softcap, case.heads // case.kv_heads

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        s = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        if cap is not None:
            s = cap * torch.tanh(s / cap)
        if mask is not None:
            s = s.masked_fill(~mask, float("-inf"))
        return torch.softmax(s, -1, dtype=torch.float32).to(q.dtype) @ v

    return attention


def stock(case: Case, device: str) -> Attention:
    if case.softcap is None:
        mask = None if case.window is None else dense_mask(case, device)
        return torch.compile(_sdpa(case, mask), dynamic=False)
    return torch.compile(eager(case, device), dynamic=False)


def sdpa(backend: SDPBackend) -> Callable[[Case, str], Attention]:
    def make(case: Case, device: str) -> Attention:
        if case.window is not None or case.softcap is not None:
            raise Unsupported("no windows, no softcap")
        plain = _sdpa(case)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return plain(q, k, v)

        return attention

    return make


def block_mask(case: Case, device: str) -> BlockMask | None:
    """FlexAttention's mask of the case's band, made from block numbers: N x N elements would not fit at 64k."""
    lower, upper = case.band
    if lower is None and upper is None:
        return None
    blocks = -(-case.length // BLOCK)
    at = torch.arange(blocks, device=device) * BLOCK
    least = at[None, :] - at[:, None] - (BLOCK - 1)  # of j - i in a block
    most = least + 2 * (BLOCK - 1)
    low = -case.length if lower is None else lower
    high = case.length if upper is None else upper
    full = (least >= low) & (most <= high)
    if case.length % BLOCK:
        full[:, -1] = full[-1, :] = False
    partial = (most >= low) & (least <= high) & ~full

    def ordered(where: Tensor) -> tuple[Tensor, Tensor]:
        columns = torch.argsort(where.int(), dim=1, descending=True, stable=True)
        return where.sum(1).int()[None, None], columns.int()[None, None].contiguous()

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if lower is None:
            return j - i <= high
        return (j - i >= low) if upper is None else (j - i >= low) & (j - i <= high)

    lengths = (case.length, case.length)
    return BlockMask.from_kv_blocks(
        *ordered(partial), *ordered(full), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=lengths
    )


def flex(case: Case, device: str) -> Attention:
    if device == "cpu":
        raise Unsupported("no backward on the CPU")
    cap, mask, grouped = case.softcap or 0.0, block_mask(case, device), case.heads != case.kv_heads

    def capped(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap * torch.tanh(s / cap)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=mask, score_mod=capped if cap else None, enable_gqa=grouped)

    return torch.compile(attention, dynamic=False)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def flash_attention(module: str, unbounded: int | None) -> Callable[[Case, str], Attention]:
    """FlashAttention's own package; ``unbounded`` is how it writes a window without an end."""

    def make(case: Case, device: str) -> Attention:
        if not _installed(module):
            raise Unsupported(f"{module} is not installed")
        function = importlib.import_module(module).flash_attn_func
        left, right = case.window, case.window
        ends = tuple(unbounded if end is None else end for end in (left, 0 if case.window and case.causal else right))
        options: dict[str, Any] = {"causal": case.causal, "window_size": ends}
        if case.softcap is not None:
            options["softcap"] = case.softcap
        if case.deterministic:
            options["deterministic"] = True

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        return attention

    return make


IMPLEMENTATIONS: dict[str, Callable[[Case, str], Attention]] = {
    "ours": ours,
    "stock": stock,
    "eager": eager,
    "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "flex": flex,
    "fa3": flash_attention("flash_attn_interface", -1),
    "fa4": flash_attention("flash_attn.cute", None),
    **{f"ours:{kernel}": ours_with(kernel) for kernel in KERNELS},
}
# Seconds that compiling takes, about; the others compile nothing.
COMPILE_SECONDS = {"flex": 12.0, "ours": 8.0, "stock": 3.0, "fa4": 20.0, "ours:triton": 6.0, "ours:gluon": 8.0}
