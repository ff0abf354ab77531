"""Launches that are repeated give the driver what Triton would, for whatever tensors they are repeated with."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flash_inductor._compat import cuda_driver
from flash_inductor.ops import hopper, hopper_backward
from flash_inductor.ops.hopper_problem import scratch_size
from flash_inductor.ops.launch import _MAPS_KEPT, Launch, Repeated, _Map
from flash_inductor.spec import MaskSpec

from .pretend import compile_for_hopper


class _Function:
    """One of the driver's: notes its calls, and gives the results that are listed, then 0."""

    def __init__(self, results: tuple[int, ...] = ()) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.results = list(results)

    def __call__(self, *args: Any) -> int:
        self.calls.append(args)
        return self.results.pop(0) if self.results else 0


class _Launch(_Function):
    """cuLaunchKernel: reads the parameters when it is called, as the driver does."""

    def __call__(self, *args: Any) -> int:
        read = [(at, ctypes.string_at(at, 8)) for at in args[9]]
        return super().__call__(*args[:9], read, *args[10:])


class _Driver:
    def __init__(self) -> None:
        self.cuLaunchKernel = _Launch()
        self.cuTensorMapEncodeTiled = _Function()
        self.cuDeviceGet, self.cuDevicePrimaryCtxRetain, self.cuCtxSetCurrent = (_Function() for _ in range(3))

    def cuGetErrorString(self, code: int, text: Any) -> int:
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Driver]:
    fake = _Driver()
    monkeypatch.setattr(cuda_driver, "driver", lambda: fake)
    monkeypatch.setattr(cuda_driver, "raw_stream", lambda device: 40 + device)
    yield fake


class _Metadata:
    name, num_warps, shared, num_ctas, tensordesc_meta = "toy", 4, 96, 1, None
    launch_cooperative_grid = launch_pdl = False
    global_scratch_size = profile_scratch_size = 0


class _Compiled:
    """Of a kernel ``toy(x, y, n, f, nothing)``."""

    metadata, function = _Metadata, 77

    def __init__(self, parameters: str = "u64 u64 u32 f32 u64 u64") -> None:
        text = ",\n".join(f"\t.param .{kind} toy_param_{i}" for i, kind in enumerate(parameters.split()))
        self.asm = {"ptx": f".visible .entry toy(\n{text}\n)\n.reqntid 128\n{{"}


class _Described(NamedTuple):
    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Kernel:
    def __init__(self, compiled: Any = None) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.compiled = compiled or _Compiled()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> Any:
            self.launched.append((grid, args, constants))
            return self.compiled

        return launch


def _repeated(kernel: _Kernel, device: int = 2) -> Repeated:
    return Repeated(lambda x, y: [Launch(kernel, {"C": 1}, (5,), (x, y, 7, 0.5, None))], device)


def _bytes(call: tuple[Any, ...], sizes: list[int]) -> list[bytes]:
    """What a call of cuLaunchKernel passes."""
    return [content[:size] for (_, content), size in zip(call[9], sizes, strict=True)]


def test_the_second_time_goes_past_triton(driver: _Driver) -> None:
    kernel = _Kernel()
    call = _repeated(kernel)
    call(torch.zeros(3), torch.zeros(4))
    assert [(grid, constants) for grid, _, constants in kernel.launched] == [((5,), {"C": 1})]
    assert driver.cuLaunchKernel.calls == []
    tensors = torch.zeros(3), torch.zeros(4)
    call(*tensors)
    call(tensors[1], tensors[0])
    assert len(kernel.launched) == 1
    for made, (x, y) in zip(driver.cuLaunchKernel.calls, (tensors, tensors[::-1]), strict=True):
        assert [getattr(v, "value", v) for v in made[:9]] == [77, 5, 1, 1, 128, 1, 1, 96, 42] and made[10] is None
        passed = b"".join(_bytes(made, [8, 8, 4, 4, 8, 8]))
        assert struct.unpack("<QQifQQ", passed) == (x.data_ptr(), y.data_ptr(), 7, 0.5, 0, 0)


def test_one_tensor_in_two_places_is_two_arguments(driver: _Driver) -> None:
    call = _repeated(_Kernel())
    same, x, y = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    call(same, same)
    call(x, y)
    (made,) = driver.cuLaunchKernel.calls
    assert _bytes(made, [8, 8, 4, 4, 8, 8])[:2] == [struct.pack("Q", t.data_ptr()) for t in (x, y)]


def test_descriptors_are_encoded_once_for_each_address(driver: _Driver) -> None:
    how = {"elem_size": 2, "elem_type": 10, "block_size": [64, 64], "swizzle": 3}
    described = _Map((100, 64), (64, 1), how)
    first, second = described.encode(1 << 20), described.encode(1 << 21)
    assert first != second and described.known == {1 << 20: first, 1 << 21: second}
    places = {described.encode(i << 12) for i in range(1, 2 * _MAPS_KEPT)}
    assert len(described.known) <= _MAPS_KEPT and all(at % 64 == 0 for at in places)
    kernel = _Kernel(_Compiled("map u32 u32 u64 u64 u64 u64"))
    text = kernel.compiled.asm["ptx"].replace(".map toy_param_0", ".align 64 .b8 toy_param_0[128]")
    kernel.compiled.asm["ptx"] = text
    kernel.compiled.metadata = type("Described", (_Metadata,), {"tensordesc_meta": [how]})
    x, y = torch.zeros(100, 64), torch.zeros(100, 64)
    call = Repeated(lambda x: [Launch(kernel, {}, (1,), (_Described(x, (100, 64), (64, 1)),))], 0)
    before = len(driver.cuTensorMapEncodeTiled.calls)
    for tensor in (x, x, y, x, y):  # the first goes through Triton
        call(tensor)
    made = driver.cuLaunchKernel.calls
    assert len(made) == 4 and len(driver.cuTensorMapEncodeTiled.calls) - before == 2
    assert [call[9][0][0] for call in made[2:]] == [made[0][9][0][0], made[1][9][0][0]]


def test_parts_of_the_last_tensor(driver: _Driver) -> None:
    kernel = _Kernel()
    call = Repeated(lambda x, scratch: [Launch(kernel, {}, (1,), (scratch[4:], x, 7, 0.5))], 0)
    x, scratch = torch.zeros(3), torch.zeros(9)
    call(torch.zeros(3), torch.zeros(9))
    call(x, scratch)
    (made,) = driver.cuLaunchKernel.calls
    expected = [struct.pack("Q", address) for address in (scratch.data_ptr() + 16, x.data_ptr())]
    assert _bytes(made, [8, 8, 4, 4, 8, 8])[:2] == expected


@pytest.mark.parametrize(
    "kernel",
    [
        _Kernel(_Compiled("u64 u64 u32 f32 u64 u32")),  # a parameter that isn't known
        _Kernel(_Compiled("u64 u32 f32 u64 u64")),  # one less than arguments
        _Kernel(object()),  # another Triton's
        _Kernel(type("Cluster", (_Compiled,), {"metadata": type("M", (_Metadata,), {"num_ctas": 2})})()),
    ],
    ids=["unknown", "missing", "foreign", "cluster"],
)
def test_what_is_not_understood_stays_with_triton(driver: _Driver, kernel: _Kernel) -> None:
    call = _repeated(kernel)
    for _ in range(3):
        call(torch.zeros(3), torch.zeros(4))
    assert len(kernel.launched) == 3 and driver.cuLaunchKernel.calls == []


def test_views_of_other_tensors_stay_with_triton(driver: _Driver) -> None:
    kernel = _Kernel()
    call = Repeated(lambda x, y: [Launch(kernel, {}, (1,), (x[1:], y, 7, 0.5))], 0)
    for _ in range(2):
        call(torch.zeros(3), torch.zeros(4))
    assert len(kernel.launched) == 2 and driver.cuLaunchKernel.calls == []


def test_profilers_see_tritons_launches(driver: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    kernel = _Kernel()
    call = _repeated(kernel)
    call(torch.zeros(3), torch.zeros(4))
    assert not cuda_driver.hooked()
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    assert cuda_driver.hooked()
    call(torch.zeros(3), torch.zeros(4))
    assert len(kernel.launched) == 2 and driver.cuLaunchKernel.calls == []


def test_a_thread_without_a_context_gets_one(driver: _Driver) -> None:
    driver.cuLaunchKernel.results = [cuda_driver.NO_CONTEXT]
    call = _repeated(_Kernel())
    for _ in range(2):
        call(torch.zeros(3), torch.zeros(4))
    assert len(driver.cuLaunchKernel.calls) == 2 and len(driver.cuCtxSetCurrent.calls) == 1
    driver.cuLaunchKernel.results = [700]
    with pytest.raises(RuntimeError, match=r"cuLaunchKernel: .* error 700"):
        call(torch.zeros(3), torch.zeros(4))


def _forward(*tensors: Tensor) -> list[Launch]:
    return hopper.forward(*tensors, scale=0.125, mask=MaskSpec(upper=0), softcap=None, processors=132)


def _backward(*tensors: Tensor) -> list[Launch]:
    return hopper_backward.backward(*tensors, scale=0.1, mask=MaskSpec(-70, 0), softcap=5.0, deterministic=True)


@pytest.mark.parametrize(("kind", "dim"), [("fwd", 64), ("bwd", 64), ("bwd", 256)])
def test_the_parameters_of_every_hopper_kernel(
    kind: str, dim: int, driver: _Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text that the assembler got says how many there are and how long; what is passed says what they hold."""

    def tensors() -> tuple[Tensor, ...]:
        query, out, grad_out, *grads = (torch.zeros(1, 200, 2, dim, dtype=torch.bfloat16).mT.mT for _ in range(6))
        query, out, grad_out, *grads = (x.transpose(1, 2) for x in (query, out, grad_out, *grads))
        key, value = (torch.zeros(1, 2, 200, dim, dtype=torch.bfloat16) for _ in range(2))
        lse = torch.zeros(1, 2, 200)
        if kind == "fwd":
            return query, key, value, out, lse, torch.zeros(1, dtype=torch.int32)
        scratch = torch.zeros(scratch_size(query, value, True))
        return grad_out, torch.zeros(1, 2, 200), query, key, value, out, lse, *grads, scratch

    def launch(self: Launch) -> Any:
        kernel = compile_for_hopper(self.kernel, self.args, self.constants)
        kernel.function = 5  # which loading it on a GPU would set
        return kernel

    monkeypatch.setattr(Launch, "__call__", launch)
    plan = _forward if kind == "fwd" else _backward
    call = Repeated(plan, 0)
    call(*tensors())
    again = tensors()
    call(*again)
    launches = plan(*again)
    assert len(driver.cuLaunchKernel.calls) == len(launches)
    maps = iter(driver.cuTensorMapEncodeTiled.calls)
    for made, expected in zip(driver.cuLaunchKernel.calls, launches, strict=True):
        addresses = iter(made[9])
        for x in expected.args:
            if x is None:
                continue
            at, content = next(addresses)
            if hasattr(x, "base"):
                # (where, element type, rank, address, sizes, strides in bytes, box, ...), the innermost first
                where, _, rank, address, sizes, strides, box = next(maps)[:7]
                assert where.value == at and at % 64 == 0 and rank == len(x.shape)
                assert address.value == x.base.data_ptr()
                assert [*sizes] == [*reversed(x.shape)]
                assert [*strides][:-1] == [x.base.element_size() * s for s in reversed(x.strides[:-1])]
                assert [*box][1:] == [*reversed(x.block_shape[:-1])]
                for number, form in (*((n, "i") for n in x.shape), *((n, "q") for n in x.strides)):
                    assert struct.unpack(form, next(addresses)[1][: struct.calcsize(form)]) == (number,)
            elif isinstance(x, Tensor):
                assert struct.unpack("Q", content) == (x.data_ptr(),)
            elif isinstance(x, int):
                assert struct.unpack("i", content[:4]) == (x,)
            else:
                assert struct.unpack("f", content[:4]) == pytest.approx((x,))
        assert [content for _, content in addresses] == [bytes(8)] * 2
    assert next(maps, None) is None
