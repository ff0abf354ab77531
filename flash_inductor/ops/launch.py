"""Kernel launches, and their repetition for other tensors without the work that Triton's own launch repeats."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .._compat import cuda_driver
from . import ahead

_MAPS_KEPT = 512  # of each descriptor, 192 bytes each: models call with few different addresses


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
        self._lock = threading.Lock()  # parameters are read when a launch is called, and rewritten for the next one

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on the current device, which is that of the tensors, and stream."""
        if self._repeats and not cuda_driver.hooked():
            stream = ctypes.c_void_p(cuda_driver.raw_stream(self._device))
            addresses = [0 if x is None else x.data_ptr() for x in tensors]
            with self._lock:
                for repeat in self._repeats:
                    repeat(stream, addresses, self._device)
            return
        # As many objects as places, though one tensor may be query and key at once.
        tensors = tuple([None if x is None else x.detach() for x in tensors])
        launches = self._plan(*tensors)
        compiled = [launch() for launch in launches]
        if self._repeats is None:
            repeats = [_repeat(*pair, tensors) for pair in zip(launches, compiled, strict=True)]
            self._repeats = tuple(x for x in repeats if x is not None) if all(repeats) else ()


class _Place(NamedTuple):
    """Where a parameter's address comes from: so many bytes behind the start of a tensor."""

    tensor: int
    offset: int


class _Map:
    """A descriptor among the parameters; ``known`` says where it lies in memory for tensors at these addresses."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], how: dict[str, Any]) -> None:
        self._fields = shape, strides, how
        self.known: dict[int, int] = {}
        self._memory: list[Any] = []

    def encode(self, address: int) -> int:
        """Where it lies from now on; that takes longer than finding it again."""
        if len(self.known) >= _MAPS_KEPT:
            self.known.clear()
            self._memory.clear()
        self._memory.append(ctypes.create_string_buffer(cuda_driver.MAP_BYTES + 64))
        at = -(-ctypes.addressof(self._memory[-1]) // 64) * 64
        cuda_driver.encode_map(at, address, *self._fields)
        self.known[address] = at
        return at


class _Parameter(NamedTuple):
    """The bytes of a number, or of what has an address its place."""

    value: bytes | _Place
    descriptor: _Map | None = None


class _Repeat:
    """One launch without the addresses."""

    def __init__(self, compiled: cuda_driver.Compiled, blocks: int, parameters: Sequence[_Parameter]) -> None:
        one = ctypes.c_uint(1)
        self._head = (
            ctypes.c_void_p(compiled.function), ctypes.c_uint(blocks), one, one, ctypes.c_uint(compiled.threads), one,
            one, ctypes.c_uint(compiled.shared_memory),
        )  # fmt: skip
        self._words = (ctypes.c_uint64 * len(parameters))()
        first = ctypes.addressof(self._words)
        self._pointers = (ctypes.c_void_p * len(parameters))(*range(first, first + 8 * len(parameters), 8))
        self._addresses: list[tuple[int, _Place]] = []
        self._maps: list[tuple[int, _Place, _Map]] = []
        for i, (value, descriptor) in enumerate(parameters):
            if isinstance(value, bytes):
                ctypes.memmove(first + 8 * i, value, len(value))
            elif descriptor is None:
                self._addresses.append((i, value))
            else:
                self._maps.append((i, value, descriptor))

    def __call__(self, stream: ctypes.c_void_p, addresses: Sequence[int], device: int) -> None:
        words, pointers = self._words, self._pointers
        for i, (tensor, offset) in self._addresses:
            words[i] = addresses[tensor] + offset
        for i, (tensor, offset), descriptor in self._maps:
            address = addresses[tensor] + offset
            pointers[i] = descriptor.known.get(address) or descriptor.encode(address)
        launch = cuda_driver.driver().cuLaunchKernel
        code = launch(*self._head, stream, pointers, None)
        if code == cuda_driver.NO_CONTEXT:  # a thread that has done nothing on a GPU before
            cuda_driver.enter_context(device)
            code = launch(*self._head, stream, pointers, None)
        if code:
            cuda_driver.check(code, "cuLaunchKernel")


def _repeat(launch: Launch, kernel: Any, tensors: Sequence[Tensor | None]) -> _Repeat | None:
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
                parameters.append(_Parameter(place, _Map(tuple(x.shape), tuple(x.strides), next(maps))))
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
    return _Repeat(compiled, launch.grid[0], parameters)


def _place(x: Tensor, tensors: Sequence[Tensor | None]) -> _Place | None:
    for i, tensor in enumerate(tensors):
        if x is tensor:
            return _Place(i, 0)
    last = tensors[-1]
    assert last is not None
    offset = x.data_ptr() - last.data_ptr()
    inside = x.untyped_storage().data_ptr() == last.untyped_storage().data_ptr() and offset >= 0
    return _Place(len(tensors) - 1, offset) if inside and offset < last.nbytes else None
