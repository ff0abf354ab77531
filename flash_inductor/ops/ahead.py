"""Compiles kernels in Inductor's worker processes, while Inductor still works on the graph that will launch them.

A worker only fills Triton's cache on disk: the launch compiles as ever, and finds the result there.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Hashable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from .._compat import compile_workers

log = logging.getLogger(__name__)
_PATIENCE = 60.0  # seconds that a launch waits for a worker, before it compiles itself
_seen: set[Hashable] = set()
_begun: dict[Hashable, Future[str]] = {}  # that no launch has waited for


class _Job(NamedTuple):
    """What a worker is told: all of it picklable, and tensors on the meta device."""

    module: str
    kernel: str
    constants: dict[str, Any]
    args: tuple[Any, ...]
    arch: int
    environment: dict[str, str]
    folders: tuple[str, ...]


def begin(kernel: Any, constants: dict[str, Any], grid: tuple[int, ...], args: tuple[Any, ...], device: int) -> None:
    """Compile for a later launch on a CUDA device; tensors of ``args`` are on the meta device.  Never raises."""
    key = _key(kernel, constants, args, device)
    if key in _seen:
        return
    _seen.add(key)
    try:
        from triton import knobs

        major, minor = torch.cuda.get_device_capability(device)
        # Triton's own, and Inductor's: which it will be at the launch, here or in a later process, isn't known yet.
        folders = dict.fromkeys((knobs.cache.dir, compile_workers.triton_folder(device) or knobs.cache.dir))
        job = _Job(
            kernel.fn.__module__, kernel.fn.__name__, constants, args, 10 * major + minor,
            _environment(), tuple(folders),
        )  # fmt: skip
        future = compile_workers.submit(_compile, job)
    except Exception as error:  # the launch will compile it
        log.debug("%s isn't compiled ahead: %s: %s", kernel, type(error).__name__, error)
        return
    if future is not None:
        _begun[key] = future


def join(kernel: Any, constants: dict[str, Any], args: tuple[Any, ...]) -> None:
    """Wait until what was begun of a kernel for the current device is there: two compilations would take longer."""
    if not _begun:
        return
    key = _key(kernel, constants, args, torch.cuda.current_device())
    if (future := _begun.get(key)) is None:
        return
    try:
        log.debug("%s was compiled ahead: %s", kernel, future.result(_PATIENCE))
    except Exception as error:  # the launch will meet it again, and knows what to do; or the worker is dead
        log.debug("%s wasn't compiled ahead: %s: %s", kernel, type(error).__name__, error)
    _begun.pop(key, None)


def _compile(job: _Job) -> str:
    """In a worker, without a call to CUDA: the hash of the compiled kernel, whose files are in all the folders."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.cache import get_cache_manager

    target = GPUTarget("cuda", job.arch, 32)
    kernel = getattr(importlib.import_module(job.module), job.kernel)
    before, environment = driver._active, _environment()
    _set_environment({**job.environment, "TRITON_CACHE_DIR": job.folders[0]})
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )
    try:
        compiled = kernel.warmup(*job.args, grid=(1,), **job.constants)
        for folder in job.folders[1:]:
            os.environ["TRITON_CACHE_DIR"] = folder
            get_cache_manager(compiled.hash).put_group(f"{compiled.src.name[:150]}.json", compiled.metadata_group)
        return str(compiled.hash)
    finally:
        driver._active = before
        kernel.device_caches.clear()  # the next job may be for another GPU
        _set_environment(environment)


def _environment() -> dict[str, str]:
    """What Triton reads: Inductor changes it, in its workers and here, at different times."""
    return {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}


def _set_environment(values: dict[str, str]) -> None:
    for name in _environment().keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)


def _key(kernel: Any, constants: dict[str, Any], args: tuple[Any, ...], device: int) -> Hashable:
    """Of a compiled variant; Triton compiles integers that are 1, or multiples of 16, apart."""
    kinds = tuple(
        (x == 1, x % 16 == 0) if isinstance(x, int) else getattr(getattr(x, "base", x), "dtype", None) for x in args
    )
    return kernel, tuple(constants.items()), kinds, device
