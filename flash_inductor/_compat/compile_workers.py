"""The processes in which Inductor compiles its own kernels, for jobs of ours; the same in torch 2.11 .. 2.15."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def submit(function: Callable[..., Any], *args: Any) -> Future[Any] | None:
    """Call a function in such a process, both picklable; None where Inductor has started none.

    It starts none with ``compile_threads`` 1 or threads instead, nor in a process forked from one that has them.
    Raises what pickling raises, and RuntimeError if the processes are gone.
    """
    try:
        from torch._inductor.async_compile import AsyncCompile, get_compile_threads

        if get_compile_threads() <= 1 or not AsyncCompile.process_pool.cache_info().currsize:
            return None
    except (ImportError, AttributeError):
        return None
    return AsyncCompile.process_pool().submit(function, *args)


def triton_folder(device: int) -> str | None:
    """Where Triton looks for compiled kernels as soon as Inductor loads one of its own in this process."""
    try:
        from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    except ImportError:
        return None
    return str(triton_cache_dir(device))
