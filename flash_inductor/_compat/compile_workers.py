"""Compiles kernels in the processes in which Inductor compiles its own; the same in torch 2.11 .. 2.15.

Triton files a compiled kernel under its source, its options and its surroundings: some environment variables, and the
version of ptxas, which a process asks for once and keeps.  Inductor's processes use torch's ptxas, the one that
launches mostly Triton's own: a kernel is found only if it was compiled in the surroundings in which it is launched.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import Any, NamedTuple

_LOOK_EVERY = 0.5  # seconds between looks at whether the processes are there


def running() -> bool:
    """Whether Inductor has started such processes.

    It starts none with ``compile_threads`` 1 or threads instead, nor in a process forked from one that has them.
    """
    try:
        from torch._inductor.async_compile import AsyncCompile, get_compile_threads

        return get_compile_threads() > 1 and AsyncCompile.process_pool.cache_info().currsize > 0
    except (ImportError, AttributeError):
        return False


def ready() -> bool:
    """Whether they have begun to work; they take seconds to start."""
    from torch._inductor.async_compile import AsyncCompile

    return running() and bool(AsyncCompile.use_process_pool())


def submit(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call a function in one of them, both picklable.

    Raises what pickling raises, and RuntimeError or OSError if the processes are gone.
    """
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.use_process_pool()  # asks for a sign of life: `ready` would do so too late
    return AsyncCompile.process_pool().submit(function, *args)


def result(future: Future[Any], seconds: float) -> Any:
    """What a call gave or raised; TimeoutError if it is not there in time, or the processes are gone.

    A pool whose process was killed leaves its futures open, in every version.
    """
    from torch._inductor.async_compile import AsyncCompile

    end = time.monotonic() + seconds
    while not future.done():
        process = getattr(AsyncCompile.process_pool(), "process", None)  # a pool of Python's own has none
        gone = process is not None and process.poll() is not None
        if gone or time.monotonic() >= end:
            raise TimeoutError
        wait([future], min(_LOOK_EVERY, max(0.0, end - time.monotonic())))
    return future.result()


class Surroundings(NamedTuple):
    """What a compiled kernel depends on beside its source and options; ``key`` tells whether two are the same."""

    arch: int
    ptxas: str
    environment: dict[str, str]
    folders: tuple[str, ...]
    key: str


def surroundings(arch: int, device: int) -> Surroundings:
    """Those of this process, for a CUDA device of a compute capability."""
    from triton import knobs
    from triton.backends.nvidia import compiler

    folders = [knobs.cache.dir]
    with contextlib.suppress(ImportError):
        from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

        # Where Triton looks as soon as Inductor has loaded a kernel of its own: maybe before the launch, maybe not.
        folders.append(str(triton_cache_dir(device)))
    # Asking settles the version for this process, as the launch would.
    return Surroundings(
        arch, compiler.get_ptxas_version(arch), _environment(), tuple(dict.fromkeys(folders)), _key(arch)
    )


def compile_in(where: Surroundings, kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> str:
    """Fill Triton's caches in these folders, without a call to CUDA; the hash of the compiled kernel.

    Raises RuntimeError where the surroundings can't be made the same.  Everything is put back.
    """
    from triton.backends.nvidia import compiler
    from triton.runtime import driver
    from triton.runtime.cache import get_cache_manager

    with contextlib.ExitStack() as stack:
        for group in _knob_groups():
            stack.enter_context(group.scope())
            group.reset()  # what is set in Python hides the environment
        stack.enter_context(_in_environment({**where.environment, "TRITON_CACHE_DIR": where.folders[0]}))
        stack.enter_context(_replaced(compiler, "get_ptxas_version", lambda arch=80: where.ptxas))
        stack.enter_context(_replaced(driver, "_active", _driver(where.arch)))
        if (key := _key(where.arch)) != where.key:
            raise RuntimeError(f"compiled here, it wouldn't be found there: {key} is not {where.key}")
        stack.callback(kernel.device_caches.clear)  # the next one may be for another GPU
        compiled = kernel.warmup(*args, grid=(1,), **constants)
        for folder in where.folders[1:]:
            os.environ["TRITON_CACHE_DIR"] = folder
            get_cache_manager(compiled.hash).put_group(f"{compiled.src.name[:150]}.json", compiled.metadata_group)
        return str(compiled.hash)


def _key(arch: int) -> str:
    """Triton's own for a kernel without source and options."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key

    backend = make_backend(GPUTarget("cuda", arch, 32))
    source = SimpleNamespace(hash=str)
    key = get_cache_key(source, backend, backend.parse_options({}), get_cache_invalidating_env_vars())
    return hashlib.sha256(key.encode()).hexdigest()


def _driver(arch: int) -> Any:
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", arch, 32)
    return SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )


def _knob_groups() -> list[Any]:
    from triton import knobs

    return [x for x in vars(knobs).values() if isinstance(x, knobs.base_knobs)]


def _environment() -> dict[str, str]:
    """What Triton reads: Inductor changes it, in its processes and in the one that launches, at different times."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    names = {knob.key for group in _knob_groups() for knob in group.knob_descriptors.values()}
    names.update(get_cache_invalidating_env_vars())
    return {name: value for name, value in os.environ.items() if name in names or name.startswith("TRITON_")}


@contextlib.contextmanager
def _in_environment(values: dict[str, str]) -> Iterator[None]:
    before = _environment()
    try:
        _set_environment(values)
        yield
    finally:
        _set_environment(before)


def _set_environment(values: dict[str, str]) -> None:
    for name in _environment().keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
