"""Launches through CUDA's driver, for kernels that Triton compiled, and torch's shortest ways to a stream and memory.

Of Triton this reads what a compiled kernel says of itself (``function``, ``metadata``, ``asm``): the same in
3.6 to 3.9.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

Extents = Sequence[int]

_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
_PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.[bsuf](\d+)[^\n\[]*(?:\[(\d+)\])?")
# Triton's numbers for a descriptor's element types are those of the device; CUtensorMapDataType orders them otherwise.
_ELEMENT_TYPES = {8: 10, 9: 8, 10: 9}
_L2_PROMOTION_128B = 2
NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
MAP_BYTES = 128  # sizeof(CUtensorMap), which has to lie at a multiple of 64


def _raw_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)
"""The current stream of a device as the driver's handle."""


class Compiled(NamedTuple):
    """What launching a compiled kernel takes: ``function`` is the driver's handle, of the context it was loaded in.

    ``parameters``: the bytes of each, in order.  ``maps``: of each descriptor among them, how it is encoded.
    """

    function: int
    threads: int
    shared_memory: int
    parameters: tuple[int, ...]
    maps: tuple[dict[str, Any], ...]


def compiled(kernel: Any) -> Compiled | None:
    """None for kernels that need more than that, or of a Triton that says it otherwise."""
    try:
        meta = kernel.metadata
        plain = (
            getattr(meta, "num_ctas", 1) == 1
            and not meta.launch_cooperative_grid
            and not meta.launch_pdl
            and not meta.global_scratch_size
            and not meta.profile_scratch_size
        )
        if not plain or not isinstance(kernel.function, int):
            return None
        entry = kernel.asm["ptx"].split(f".entry {meta.name}(", 1)[1].split(")", 1)[0]
        sizes = tuple(_BYTES[bits] * int(count or 1) for bits, count in _PARAMETER.findall(entry))
        return Compiled(kernel.function, 32 * meta.num_warps, meta.shared, sizes, tuple(meta.tensordesc_meta or ()))
    except (AttributeError, KeyError, IndexError):
        return None


def hooked() -> bool:
    """Whether a profiler wants to see Triton's launches."""
    runtime = _runtime_knobs()
    enter, leave = getattr(runtime, "launch_enter_hook", None), getattr(runtime, "launch_exit_hook", None)
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@lru_cache
def _runtime_knobs() -> Any:
    try:
        from triton import knobs
    except ImportError:  # moved: nobody hooks what isn't there
        return None
    return knobs.runtime


@lru_cache
def driver() -> Any:
    """CUDA's driver; None where there is none, or one without TMA."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuTensorMapEncodeTiled  # noqa: B018 - raises where it is unknown
    except (OSError, AttributeError):
        return None
    return library


def check(code: int, what: str) -> None:
    """Raise what a result of the driver means, if it is an error."""
    if code:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'unknown error').decode()} (CUDA driver error {code})")


def enter_context(device: int) -> None:
    """Make the context that torch and Triton use the current one of this thread."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    check(driver().cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
    check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
    check(driver().cuCtxSetCurrent(context), "cuCtxSetCurrent")


def encode_map(at: int, address: int, shape: Extents, strides: Extents, how: dict[str, Any]) -> None:
    """Write a descriptor of a tensor at ``address`` to ``at``; shape and strides in elements, outermost first."""
    rank, size = len(shape), how["elem_size"]
    sizes = (ctypes.c_uint64 * rank)(*reversed(shape))
    steps = (ctypes.c_uint64 * rank)(*(size * stride for stride in reversed(strides[:-1])))
    box = (ctypes.c_uint32 * rank)(*reversed(how["block_size"]))
    ones = (ctypes.c_uint32 * rank)(*(1,) * rank)
    element = _ELEMENT_TYPES.get(how["elem_type"], how["elem_type"])
    code = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), element, rank, ctypes.c_void_p(address), sizes, steps, box, ones,
        0, how["swizzle"], _L2_PROMOTION_128B, 0,
    )  # fmt: skip
    check(code, "cuTensorMapEncodeTiled")


def _empty_strided(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, strides, dtype=dtype, device="cuda")


empty_strided: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", _empty_strided
)
"""Memory on the current CUDA device, as Inductor's code gets it: in half of ``torch.empty_strided``'s time."""
