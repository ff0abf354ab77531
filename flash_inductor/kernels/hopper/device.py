# mypy: disallow-untyped-defs=False
"""What the Hopper kernels share: instructions Gluon's front end doesn't offer, and tensor descriptors.

Needs Triton's Gluon; only modules that launch these kernels import it, and only when they do.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core as core
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

try:
    from triton.experimental.gluon import aggregate as _aggregate
except ImportError:
    from triton.language.core import _aggregate

# Newer Tritons call them async_load and async_store, and keep the old names to raise an error.
tma_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)
tma_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)

_ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@core.builtin
def tma_reduce_add(desc, coord, src, _semantic=None):
    """Add a shared memory tile to global memory; ``tma.store_wait`` waits for it as for stores."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@core.builtin
def _named_barrier(kind, index, threads, _semantic=None):
    kind, index, threads = (core._unwrap_if_constexpr(x) for x in (kind, index, threads))
    asm = f"bar.{kind} {index}, {threads}; mov.u32 $0, 0;"
    core.inline_asm_elementwise(asm, "=r", [], core.int32, False, 1, _semantic=_semantic)


@gluon.jit
def bar_sync(INDEX: gl.constexpr, THREADS: gl.constexpr):
    """Wait at a named barrier until ``THREADS`` threads have come to it.  Triton uses the low numbers itself."""
    _named_barrier("sync", INDEX, THREADS)


@gluon.jit
def bar_arrive(INDEX: gl.constexpr, THREADS: gl.constexpr):
    """Come to a named barrier without waiting for the others."""
    _named_barrier("arrive", INDEX, THREADS)


@gluon.jit
def tanh_approx(x):
    """The hardware's tanh, good to 2**-11: below the rounding of bf16 scores, not of fp16 ones."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def tanh_exp(x):
    """tanh to 2**-22, absolute, at twice the cost: an exponential and a reciprocal."""
    e = gl.exp2(x * (2.0 * LOG2E))
    r = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [e + 1.0], gl.float32, is_pure=True, pack=1)
    return 1.0 - 2.0 * r


@gluon.jit
def tanh(x, DTYPE: gl.constexpr):
    """The cheapest tanh whose error is below the rounding of ``DTYPE``, the element type of query and key."""
    if DTYPE == gl.bfloat16:  # noqa: SIM300 (Triton compares with the constexpr on the left)
        return tanh_approx(x)
    else:
        return tanh_exp(x)


@gluon.jit
def pin16(x):
    """16-bit data as it is, but computed here: LLVM may not move it across waits and products that follow."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def pack16(x):
    """Pairs of 16-bit elements as int32: what a loop carries as 16-bit is taken apart and put together again."""
    low, high = gl.split(x.to(gl.int16, bitcast=True).reshape([x.shape[0], x.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack16(x, dtype: gl.constexpr):
    """What :func:`pack16` was given."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.join(low, high).reshape([x.shape[0], x.shape[1] * 2]).to(dtype, bitcast=True)


def struct(cls: type) -> Any:
    """A class of kernel values, constants and descriptors that kernels pass around as one: made from its annotations.

    Its values are given in the order of the annotations, and it may have methods that are ``gluon.jit``.
    """
    names = tuple(cls.__annotations__)
    constant = tuple(kind is gl.constexpr for kind in cls.__annotations__.values())

    @gluon.constexpr_function
    def __init__(self, *values):
        for i in range(len(names)):
            setattr(self, names[i], gl.constexpr(values[i]) if constant[i] else values[i])

    cls.__init__ = __init__  # type: ignore[misc]
    return _aggregate(cls)


@gluon.constexpr_function
def accumulator(columns):
    """Layout of the result of one warpgroup's products: 64 rows."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@lru_cache(maxsize=4096)
def _boxes(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, rows: int, cols: int) -> dict[str, Any]:
    """The fields of a descriptor but for its tensor."""
    block = [1, 1, rows, cols]
    free = 16 // dtype.itemsize  # the stride of a dim of one element may be anything: give one that TMA accepts
    return {
        "shape": list(size),
        "strides": [*(s if n > 1 else free for s, n in zip(strides[:3], size, strict=False)), 1],
        "block_shape": block,
        "layout": gl.NVMMASharedLayout.get_default_for(block, _ELEMENTS[dtype]),
    }


@lru_cache(maxsize=4096)
def _flat(size: tuple[int, int], rows: int, cols: int) -> dict[str, Any]:
    """The same for a contiguous fp32 matrix, not swizzled."""
    return {
        "shape": list(size),
        "strides": [size[1], 1],
        "block_shape": [rows, cols],
        "layout": gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2),
    }


def _descriptor(x: Tensor, fields: dict[str, Any]) -> TensorDescriptor:
    """Past the constructor, whose checks repeat what was checked before and take longer than all the rest."""
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.__dict__.update(fields)
    descriptor.base = x
    return descriptor


def tile_descriptor(x: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """A [batch, heads, length, head dim] tensor in boxes [1, 1, rows, cols], swizzled for wgmma.

    TMA clips at every bound, zeros on load and nothing on store: ragged lengths need no masks on this side, and a box
    may be wider than the head dim.  What TMA asks of the strides: see ``ops.hopper.aligned``.
    """
    return _descriptor(x, _boxes(x.shape, x.stride(), x.dtype, rows, cols))


def row_descriptor(x: Tensor, cols: int) -> TensorDescriptor:
    """A contiguous fp32 [rows, length] tensor in boxes [1, cols], not swizzled: numbers that go with query rows."""
    return _descriptor(x, _flat(x.shape, 1, cols))


def flat_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """A contiguous fp32 [n, 256] scratch tensor in boxes [rows, 256], not swizzled: a copy as it lies in memory."""
    return _descriptor(x, _flat(x.shape, rows, 256))
