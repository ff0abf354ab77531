"""Kernel launches, and their repetition for other tensors without the work that Triton's own launch repeats."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from .._compat import cuda_driver
from . import ahead

_BLOCKS_KEPT = 4096  # of parameters, of 1 to 3 KB each


class Launch(NamedTuple):
    """A kernel with its grid and arguments; a value, so that tests can compile it where it can't run.

    ``args`` are tensors, descriptors, numbers and None; ``constants`` every constexpr by name, and Triton's options.
    """

    kernel: Any
    constants: dict[str, Any]
    grid: tuple[int, ...]
    args: tuple[Any, ...]

    def __call__(self) -> Any:
        """Launch on the current device and stream; the compiled kernel."""
        ahead.join(self.kernel, self.constants, self.args)
        return self.kernel[self.grid](*self.args, **self.constants)


class Repeated:
    """Launches what ``plan(*tensors)`` lists, and from the second time on the same for other tensors, without a plan.

    Every tensor of a launch has to be one of those that ``plan`` is given, or to lie in the last of these; their
    shapes, strides, dtypes and device are the same each time.  Otherwise, and where kernels can't be launched past
    Triton, the plan is made each time.
    """

    def __init__(self, plan: Callable[..., list[Launch]], device: int) -> None:
        self._plan, self._device = plan, device
        self._repeats: tuple[_Repeat, ...] | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on the current device, which is that of the tensors, and stream."""
        if self._repeats and not cuda_driver.hooked():
            stream = ctypes.c_void_p(cuda_driver.raw_stream(self._device))
            addresses = tuple([0 if x is None else x.data_ptr() for x in tensors])
            for repeat in self._repeats:
                repeat(stream, addresses)
            return
        # As many objects as places, though one tensor may be query and key at once.
        tensors = tuple([None if x is None else x.detach() for x in tensors])
        launches = self._plan(*tensors)
        compiled = [launch() for launch in launches]
        if self._repeats is None:
            repeats = [_repeat(*pair, tensors, self._device) for pair in zip(launches, compiled, strict=True)]
            self._repeats = tuple(x for x in repeats if x is not None) if all(repeats) else ()


class _Place(NamedTuple):
    """Where a parameter's address comes from: so many bytes behind the start of a tensor."""

    tensor: int
    offset: int


class _Parameter(NamedTuple):
    """``value``: its bytes, or for descriptors and pointers their place."""

    value: bytes | _Place
    descriptor: tuple[Any, dict[str, Any]] | None = None  # and how it is encoded


class _Repeat:
    """One launch without the addresses."""

    def __init__(
        self, compiled: cuda_driver.Compiled, blocks: int, parameters: Sequence[_Parameter], device: int
    ) -> None:
        one = ctypes.c_uint(1)
        self.parameters, self._device = parameters, device
        self._launch = cuda_driver.driver().cuLaunchKernel
        self._head = (
            ctypes.c_void_p(compiled.function), ctypes.c_uint(blocks), one, one, ctypes.c_uint(compiled.threads), one,
            one, ctypes.c_uint(compiled.shared_memory),
        )  # fmt: skip

    def __call__(self, stream: ctypes.c_void_p, addresses: tuple[int, ...]) -> None:
        pointers = _block(self, addresses).pointers
        code = self._launch(*self._head, stream, pointers, None)
        if code == cuda_driver.NO_CONTEXT:  # a thread that has done nothing on a GPU before
            cuda_driver.enter_context(self._device)
            code = self._launch(*self._head, stream, pointers, None)
        if code:
            cuda_driver.check(code, "cuLaunchKernel")


class _Block(NamedTuple):
    """Parameters in memory, where they stay as they are: any thread may launch with them."""

    pointers: Any  # the array of their addresses
    memory: Any


@lru_cache(maxsize=_BLOCKS_KEPT)
def _block(repeat: _Repeat, addresses: tuple[int, ...]) -> _Block:
    """Models call with few different sets of addresses, and the driver takes a microsecond for each descriptor."""
    slots = [cuda_driver.MAP_BYTES if x.descriptor else 8 for x in repeat.parameters]
    order = sorted(range(len(slots)), key=lambda i: -slots[i])  # descriptors first, where they are aligned
    memory = ctypes.create_string_buffer(sum(slots) + 64)
    at = -(-ctypes.addressof(memory) // 64) * 64
    pointers = (ctypes.c_void_p * len(slots))()
    for i in order:
        value, descriptor = repeat.parameters[i]
        if isinstance(value, _Place):
            address = addresses[value.tensor] + value.offset
            if descriptor is None:
                ctypes.memmove(at, struct.pack("Q", address), 8)
            else:
                x, how = descriptor
                cuda_driver.encode_map(at, address, x.shape, x.strides, how)
        else:
            ctypes.memmove(at, value, len(value))
        pointers[i] = at
        at += slots[i]
    return _Block(pointers, memory)


def _repeat(launch: Launch, kernel: Any, tensors: Sequence[Tensor | None], device: int) -> _Repeat | None:
    """None if the launch is none that can be repeated."""
    compiled = cuda_driver.compiled(kernel)
    if compiled is None or cuda_driver.driver() is None or len(launch.grid) != 1:
        return None
    parameters: list[_Parameter] = []
    maps = iter(compiled.maps)
    sizes = iter(compiled.parameters)
    try:
        for x in launch.args:
            if x is None:
                continue  # no parameter
            tensor = getattr(x, "base", x)
            if tensor is not x:
                place = _place(tensor, tensors)
                if place is None or next(sizes) != cuda_driver.MAP_BYTES:
                    return None
                parameters.append(_Parameter(place, (_Extents(tuple(x.shape), tuple(x.strides)), next(maps))))
                for number in (*x.shape, *x.strides):  # Triton passes them once more
                    parameters.append(_Parameter(struct.pack({4: "i", 8: "q"}[next(sizes)], number)))
            elif isinstance(x, Tensor):
                place = _place(x, tensors)
                if place is None or next(sizes) != 8:
                    return None
                parameters.append(_Parameter(place))
            else:
                formats = {4: "i", 8: "q"} if isinstance(x, int) else {4: "f"}
                parameters.append(_Parameter(struct.pack(formats[next(sizes)], x)))
        rest = list(sizes)  # Triton's scratch memory, of which these kernels have none
    except (StopIteration, KeyError, OverflowError, struct.error):
        return None
    if next(maps, None) is not None or any(size != 8 for size in rest):
        return None
    parameters += [_Parameter(bytes(8))] * len(rest)
    return _Repeat(compiled, launch.grid[0], parameters, device)


class _Extents(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _place(x: Tensor, tensors: Sequence[Tensor | None]) -> _Place | None:
    for i, tensor in enumerate(tensors):
        if x is tensor:
            return _Place(i, 0)
    last = tensors[-1]
    assert last is not None
    offset = x.data_ptr() - last.data_ptr()
    inside = x.untyped_storage().data_ptr() == last.untyped_storage().data_ptr() and offset >= 0
    return _Place(len(tensors) - 1, offset) if inside and offset < last.nbytes else None
