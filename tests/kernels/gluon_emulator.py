"""Runs the source of Gluon kernels on the CPU: every partition is a thread, shared memory and barriers are objects.

Gluon has no interpreter.  This one checks logic, not layouts: indices, barrier phases, deadlocks, buffers that are
released before they were read.  Products read their operands when they are waited for, as late as the hardware may;
TMA stores happen at ``store_wait``; loads take a while and fill what is out of bounds with zeros.
"""

from __future__ import annotations

import ast
import random
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_TIMEOUT = 20.0


class _Local(threading.local):
    """Of the thread of one partition."""

    products: list[_Product]
    stores: list[Callable[[], Tensor]]
    program: int
    programs: int
    named: dict[int, _NamedBarrier]


_local = _Local()
_lock = threading.Lock()


class _Barrier:
    """An mbarrier: its phase flips when all have arrived and all bytes have come."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int = 1, expected: int = 0, came: int = 0) -> None:
        with self.changed:
            self.pending -= count
            self.bytes += expected - came
            if self.pending < 0:
                raise RuntimeError("more arrivals than the barrier counts")
            if self.pending == self.bytes == 0:
                self.phase ^= 1
                self.pending = self.count
                self.changed.notify_all()

    def wait(self, phase: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase != phase, timeout=_TIMEOUT):
                raise RuntimeError(f"deadlock: phase {phase}, {self.pending} arrivals and {self.bytes} bytes to come")


class _NamedBarrier:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.threads = self.round = 0

    def come(self, threads: int, *, wait: bool) -> None:
        with self.changed:
            self.threads += 128
            mine = self.round
            if self.threads == threads:
                self.threads = 0
                self.round += 1
                self.changed.notify_all()
            elif wait and not self.changed.wait_for(lambda: self.round != mine, timeout=_TIMEOUT):
                raise RuntimeError("deadlock at a named barrier")


class _Barriers:
    def __init__(self, count: int) -> None:
        self.barriers = [_Barrier() for _ in range(count)]

    def index(self, i: int) -> _Barrier:
        return self.barriers[i]


class _Shared:
    """A view of shared memory."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def index(self, i: int) -> _Shared:
        return _Shared(self.data[range(self.data.shape[0])[i]])

    def permute(self, order: Sequence[int]) -> _Shared:
        return _Shared(self.data.permute(tuple(order)))

    def reshape(self, shape: Sequence[int]) -> _Shared:
        return _Shared(self.data.view(shape))

    def slice(self, start: int, length: int, dim: int = 0) -> _Shared:
        return _Shared(self.data.narrow(dim, start, length))

    def load(self, layout: Any = None) -> Tensor:
        return self.data.clone()

    def store(self, values: Tensor) -> None:
        if values.shape != self.data.shape or values.dtype != self.data.dtype:
            raise TypeError(f"{values.dtype} {values.shape} stored to {self.data.dtype} {self.data.shape}")
        self.data.copy_(values)


class _Product:
    """A wgmma in flight; anything but waiting for it is an error, for it has no tensor methods."""

    def __init__(self, a: Any, b: _Shared, added: Any) -> None:
        self.a = a.clone() if isinstance(a, Tensor) else a
        self.b, self.added = b, added
        self.result: Tensor | None = None

    def finish(self) -> None:
        a = self.a if isinstance(self.a, Tensor) else self.a.data
        added = self.added.result if isinstance(self.added, _Product) else self.added
        product = a.float() @ self.b.data.float()
        self.result = product if added is None else product + added


class Descriptor:
    """A tensor that TMA copies boxes of, zeros and nothing where they are out of bounds."""

    def __init__(self, data: Tensor, block_shape: Sequence[int]) -> None:
        self.data, self.block_shape = data, list(block_shape)
        self.dtype, self.layout = data.dtype, None

    def box(self, at: Sequence[int]) -> Tensor:
        return self.data[tuple(slice(i, i + n) for i, n in zip(at, self.block_shape, strict=True))]

    def load(self, at: Sequence[int], barrier: _Barrier, shared: _Shared) -> None:
        time.sleep(random.random() * 2e-4)
        source = self.box(at)
        target = shared.data.view(self.block_shape)
        target.zero_()
        target[tuple(slice(n) for n in source.shape)] = source
        barrier.arrive(0, came=target.numel() * target.element_size())

    def store(self, at: Sequence[int], shared: _Shared) -> None:
        target = self.box(at)
        source = shared.data.view(self.block_shape)
        _local.stores.append(lambda: target.copy_(source[tuple(slice(n) for n in target.shape)]))

    def add(self, at: Sequence[int], shared: _Shared) -> None:
        target = self.box(at)
        source = shared.data.view(self.block_shape)

        def run() -> Tensor:
            with _lock:
                return target.add_(source[tuple(slice(n) for n in target.shape)])

        _local.stores.append(run)


class Pointer:
    """To contiguous memory; sums with ints or int tensors point further."""

    def __init__(self, data: Tensor, offset: Any = 0) -> None:
        self.data, self.offset = data.view(-1), offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.data, self.offset + offset)


def _mma(a: Any, b: _Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    product = _Product(a, b, acc if use_acc else None)
    _local.products.append(product)
    return product if is_async else _mma_wait(0, [product])


def _mma_wait(pending: int, deps: list[Any]) -> Any:
    while len(_local.products) > pending:
        _local.products.pop(0).finish()
    results = tuple(d.result if isinstance(d, _Product) else d for d in deps)
    if any(r is None for r in results):
        raise RuntimeError("a product that isn't waited for is used")
    return results[0] if len(results) == 1 else results


def _store_wait(pending: int) -> None:
    while len(_local.stores) > pending:
        _local.stores.pop(0)()


def _allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    if dtype is torch.int64:
        return _Barriers(shape[0]) if len(shape) > 1 else _Barrier()
    return _Shared(torch.full(tuple(shape), torch.nan if dtype.is_floating_point else -1, dtype=dtype))


def _store(pointer: Pointer, values: Any, mask: Tensor | None = None) -> None:
    if mask is None:
        pointer.data[pointer.offset] = values
    else:
        pointer.data[pointer.offset[mask]] = values[mask]


def _atomic_add(pointer: Pointer, value: int, sem: str = "") -> int:
    with _lock:
        old = int(pointer.data[pointer.offset])
        pointer.data[pointer.offset] += value
    return old


def _await_turn(pointer: Pointer, turn: int) -> None:
    """Programs run one after the other: the turn must have come."""
    if pointer.data[pointer.offset] < turn:
        raise RuntimeError(f"deadlock: turn {turn}, but it is {pointer.data[pointer.offset]}")


def _pass_turn(pointer: Pointer, turn: int) -> None:
    _store_wait(0)
    if pointer.data[pointer.offset] >= turn:
        raise RuntimeError(f"turn {turn} comes after {pointer.data[pointer.offset]}")
    pointer.data[pointer.offset] = turn


def _warp_specialize(partitions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *resources: Any) -> None:
    errors: list[str] = []
    program, programs, named = _local.program, _local.programs, _local.named

    def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        _start(program, programs, named)
        try:
            function(*arguments)
            if _local.products or _local.stores:
                raise RuntimeError("a partition ended with products or stores in flight")
        except Exception:
            errors.append(traceback.format_exc())

    threads = [threading.Thread(target=run, args=partition) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise RuntimeError("\n".join(errors))


def _start(program: int, programs: int, named: dict[int, _NamedBarrier]) -> None:
    _local.program, _local.programs, _local.named = program, programs, named
    _local.products, _local.stores = [], []


def _come(index: int, threads: int, wait: bool) -> None:
    with _lock:
        barrier = _local.named.setdefault(index, _NamedBarrier())
    barrier.come(threads, wait=wait)


def _struct(cls: type) -> type:
    def __init__(self: Any, *values: Any) -> None:
        for name, value in zip(cls.__annotations__, values, strict=True):
            setattr(self, name, value)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def _jit(function: Any = None, **options: Any) -> Any:
    return function or (lambda decorated: decorated)


def _where(condition: Any, a: Any, b: Any) -> Any:
    return torch.where(condition, a, b) if isinstance(condition, Tensor) else a if condition else b


def _either(ints: Callable[..., int], tensors: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda a, b: (ints if isinstance(a, int) and isinstance(b, int) else tensors)(a, b)


def _namespace() -> dict[str, Any]:
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    gl = SimpleNamespace(
        constexpr=lambda x: x, tensor=Tensor, shared_memory_descriptor=_Shared, bfloat16=torch.bfloat16,
        float16=torch.float16, float32=torch.float32, int32=torch.int32, int64=torch.int64,
        zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
        arange=lambda start, end, layout=None: torch.arange(start, end), where=_where, exp2=torch.exp2,
        log2=torch.log2, max=lambda x, axis: int(x[0]) if x.ndim == 1 else x.amax(axis),
        sum=lambda x, axis: x.sum(axis), minimum=_either(min, torch.minimum), maximum=_either(max, torch.maximum),
        abs=torch.abs,
        cast=lambda x, dtype: x, to_tensor=lambda x: x, convert_layout=lambda x, layout: x, static_range=range,
        program_id=lambda axis: _local.program, num_programs=lambda axis: _local.programs,
        allocate_shared_memory=_allocate, store=_store, atomic_add=_atomic_add, warp_specialize=_warp_specialize,
        NVMMADistributedLayout=nothing, DotOperandLayout=nothing, SliceLayout=nothing, BlockedLayout=nothing,
        SwizzledSharedLayout=nothing, NVMMASharedLayout=SimpleNamespace(get_default_for=nothing),
        static_assert=nothing, thread_barrier=nothing,
    )  # fmt: skip
    mbarrier = SimpleNamespace(
        MBarrierLayout=nothing,
        init=lambda barrier, count: barrier.init(count),
        expect=lambda barrier, expected: barrier.arrive(expected=expected),
        arrive=lambda barrier, count=1, pred=True: barrier.arrive(count) if pred else None,
        wait=lambda barrier, phase, pred=True: barrier.wait(phase) if pred else None,
    )
    tma = SimpleNamespace(
        async_copy_global_to_shared=lambda desc, at, barrier, shared: desc.load(at, barrier, shared),
        async_copy_shared_to_global=lambda desc, at, shared: desc.store(at, shared),
        store_wait=_store_wait,
    )
    return {
        "gl": gl, "gluon": SimpleNamespace(jit=_jit, constexpr_function=_jit), "tma": tma, "mbarrier": mbarrier,
        "await_turn": _await_turn, "pass_turn": _pass_turn, "pack16": lambda x: x, "unpack16": lambda x, dtype: x,
        "tma_reduce_add": lambda desc, at, shared: desc.add(at, shared),
        "warpgroup_mma": _mma, "warpgroup_mma_wait": _mma_wait, "fence_async_shared": nothing, "struct": _struct,
        "tma_load": tma.async_copy_global_to_shared, "tma_store": tma.async_copy_shared_to_global,
        "accumulator": nothing, "tanh": lambda x, dtype: torch.tanh(x), "pin16": lambda x: x,
        "LOG2E": 1.4426950408889634, "LN2": 0.6931471805599453,
        "bar_sync": lambda index, threads: _come(index, threads, wait=True),
        "bar_arrive": lambda index, threads: _come(index, threads, wait=False),
    }  # fmt: skip


def load(*sources: Path) -> dict[str, Any]:
    """The names that files of Gluon code define, ready to be called; their imports are replaced by the emulator."""
    names = _namespace()
    for source in sources:
        tree = ast.parse(source.read_text())
        tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(tree, str(source), "exec"), names)
    return names


def launch(kernel: Callable[..., None], blocks: int, *arguments: Any, **constants: Any) -> None:
    """Run a kernel's blocks one after the other."""
    for program in range(blocks):
        _start(program, blocks, {})
        kernel(*arguments, **constants)
