"""Compiles kernels in Inductor's worker processes, while Inductor still works on the graph that will launch them.

A worker only fills Triton's cache on disk: the launch compiles as ever, and finds the result there.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compat import compile_workers

log = logging.getLogger(__name__)
_PATIENCE = 30.0  # seconds that a launch waits for a worker, before it compiles itself
_seen: set[Hashable] = set()
_begun: dict[Hashable, Future[str]] = {}  # that no launch has waited for


@dataclass(frozen=True)
class _Pointer:
    """Stands for a tensor: all that Triton asks of one."""

    dtype: torch.dtype
    address: int  # modulo 16: kernels are compiled for tensors that start at a multiple of 16 bytes, or for all

    def data_ptr(self) -> int:
        return self.address


class _Job(NamedTuple):
    """What a worker is told: all of it picklable."""

    module: str
    name: str
    source: str
    constants: dict[str, Any]
    args: tuple[Any, ...]
    where: compile_workers.Surroundings


def begin(kernel: Any, constants: dict[str, Any], args: tuple[Any, ...], arch: int, device: int) -> None:
    """Compile for a later launch on a CUDA device; tensors of ``args`` are on the meta device.  Never raises."""
    if not compile_workers.running():
        return
    try:
        key = _key(kernel, constants, args, device)
        if key in _seen:
            return
        _seen.add(key)
        given = tuple(_Pointer(x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else x for x in args)
        where = compile_workers.surroundings(arch, device)
        job = _Job(kernel.fn.__module__, kernel.fn.__name__, kernel.cache_key, constants, given, where)
        _begun[key] = compile_workers.submit(_compile, job)
    except Exception as error:  # the launch will compile it
        log.debug("%s isn't compiled ahead: %s: %s", kernel, type(error).__name__, error)


def join(kernel: Any, constants: dict[str, Any], args: tuple[Any, ...]) -> None:
    """Wait until what was begun of a kernel for the current device is there: two compilations would take longer."""
    if not _begun:
        return
    try:
        future = _begun.pop(_key(kernel, constants, args, torch.cuda.current_device()), None)
        # Processes that are still starting would be waited for longer than compiling takes.
        if future is not None and (future.done() or compile_workers.ready()):
            log.debug("%s was compiled ahead: %s", kernel, compile_workers.result(future, _PATIENCE))
    except TimeoutError:  # they are dead, or busy for long
        log.debug("%s isn't compiled yet", kernel)
        _begun.clear()
    except Exception as error:  # the launch will meet it again, and knows what to do
        log.debug("%s wasn't compiled ahead: %s: %s", kernel, type(error).__name__, error)


def _compile(job: _Job) -> str:
    """In a worker: the hash of the compiled kernel."""
    kernel = getattr(importlib.import_module(job.module), job.name)
    if kernel.cache_key != job.source:  # files have changed since they were imported
        raise RuntimeError(f"{job.name} is another kernel here")
    return compile_workers.compile_in(job.where, kernel, job.args, job.constants)


def _key(kernel: Any, constants: dict[str, Any], args: tuple[Any, ...], device: int) -> Hashable:
    """Of a compiled variant; Triton compiles integers that are 1, multiples of 16, or long, apart."""
    return kernel, tuple(constants.items()), tuple(map(_kind, args)), device


def _kind(x: Any) -> Hashable:
    if isinstance(x, int):
        return x == 1, x % 16 == 0, x.bit_length() > 31
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    return getattr(getattr(x, "base", None), "dtype", None)
