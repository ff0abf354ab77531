"""Compiles kernels in threads, while Inductor still works on the graph that will launch them."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

log = logging.getLogger(__name__)
_THREADS = 4  # a forward's kernel and the three of a backward; Triton's compiler lets Python go on
_pool: ThreadPoolExecutor | None = None
_begun: dict[Hashable, Future[None]] = {}


def begin(kernel: Any, constants: dict[str, Any], grid: tuple[int, ...], args: tuple[Any, ...], device: int) -> None:
    """Compile for a later launch on a CUDA device; ``args`` may be on the meta device.  Never raises."""
    global _pool
    key = _key(kernel, constants, args, device)
    if key in _begun:
        return
    if _pool is None:
        _pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="flash_inductor_compile")

    def compile() -> None:
        try:
            with torch.cuda.device(device):
                kernel.warmup(*args, grid=grid, **constants)
        except Exception as error:  # the launch will meet it again, and knows what to do
            log.debug("%s can't be compiled ahead: %s: %s", kernel, type(error).__name__, error)

    _begun[key] = _pool.submit(compile)


def join(kernel: Any, constants: dict[str, Any], args: tuple[Any, ...]) -> None:
    """Wait until what was begun of a kernel for the current device is there: two compilations would take longer."""
    if not _begun:
        return
    future = _begun.get(_key(kernel, constants, args, torch.cuda.current_device()))
    if future is not None:
        wait([future])


def _key(kernel: Any, constants: dict[str, Any], args: tuple[Any, ...], device: int) -> Hashable:
    dtypes = tuple(getattr(getattr(x, "base", x), "dtype", None) for x in args)
    return kernel, tuple(constants.items()), dtypes, device
