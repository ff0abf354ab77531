"""Private names of Inductor's and Dynamo's configuration: how a pass gets in and out.

Nothing here imports torch._inductor or torch._dynamo before a function needs it: that costs seconds, and
``import flash_inductor`` must not.

Config values are process-wide in torch 2.11 and per thread (ContextVar) since 2.12.  What all threads see is an entry's
*default*, so that is where passes go; an override that the calling thread has made is composed with.
"""

from __future__ import annotations

import copy
import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

log = logging.getLogger("flash_inductor")

CONFIG = "torch._inductor.config"
BACKEND_REGISTRY = "torch._dynamo.backends.registry"
PRE_GRAD = "pre_grad_custom_pass"
POST_GRAD = "post_grad_custom_pre_pass"
TIMING = "pre_grad_pass_timing"  # since 2.12


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls back once, right after a module has been imported by somebody."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self.name = name
        self.callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)  # else the search below would come here again
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        exec_module = spec.loader.exec_module

        def exec_and_call_back(module: ModuleType) -> None:
            exec_module(module)
            try:
                self.callback()
            except Exception:  # an error of ours must not break the import of torch
                log.exception("flash_inductor could not install itself into %s; please report this", self.name)

        spec.loader.exec_module = exec_and_call_back  # type: ignore[method-assign]
        return spec


class _NextImport(importlib.abc.MetaPathFinder):
    """Calls back once, when the next module is looked for after one that is being imported is complete."""

    def __init__(self, module: ModuleType, callback: Callable[[], None]) -> None:
        self.module = module
        self.callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _is_being_imported(self.module):
            sys.meta_path.remove(self)
            try:
                self.callback()
            except Exception:  # the import of something else, which must not fail
                log.exception("flash_inductor could not install itself into %s; please report this", self.module)
        return None


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def when_imported(name: str, callback: Callable[[], None]) -> None:
    """Call back now if the module is imported already, else right after it is.

    If this thread is just importing it, call back when the next module is imported after that.
    """
    if name in sys.modules:
        module = importlib.import_module(name)  # waits for another thread that is just importing it
        if _is_being_imported(module):
            sys.meta_path.insert(0, _NextImport(module, callback))
        else:
            callback()
    else:
        sys.meta_path.insert(0, _AfterImport(name, callback))


def is_imported(name: str) -> bool:
    return name in sys.modules


def _config() -> Any:
    return importlib.import_module(CONFIG)


def _override(entry: Any) -> tuple[bool, Any]:
    """Whether the calling thread (2.11: anybody) has assigned this config value, and what."""
    from torch.utils._config_module import _UNSET_SENTINEL

    value = entry.user_override
    if isinstance(value, ContextVar):
        value = value.get()
    return value is not _UNSET_SENTINEL, value


def split(value: Any) -> tuple[Any, ...]:
    """A config value that holds passes -> the passes."""
    from .pass_chain import PassChain

    if value is None:
        return ()
    if isinstance(value, PassChain):
        return value.passes
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def join(passes: Sequence[Any]) -> Any:
    """Passes -> a config value that holds them: None, the pass, a tuple, or before 2.13 (no tuples) one PassChain."""
    import torch._inductor.custom_graph_pass as custom_graph_pass

    from .pass_chain import PassChain

    passes = tuple(passes)
    if not passes:
        return None
    if hasattr(custom_graph_pass, "get_custom_graph_passes"):
        # A tuple even for one: config reads deep-copy any default that is not of an immutable type.
        return passes
    return passes[0] if len(passes) == 1 else PassChain(passes)


def passes_in_force(name: str) -> tuple[Any, ...]:
    """The passes a compile in this thread would run."""
    return split(getattr(_config(), name))


def add_pass(name: str, pass_: Any) -> None:
    """Put a pass in front of those there are, for every thread."""
    config = _config()
    entry = config._config[name]
    default = split(entry.default)
    if pass_ not in default:
        entry.default = join((pass_, *default))
    overridden, value = _override(entry)
    if overridden and pass_ not in split(value):
        setattr(config, name, join((pass_, *split(value))))


def drop_pass(name: str, pass_: Any) -> None:
    """Undo :func:`add_pass`; another thread's own override keeps the pass, which must then do nothing."""
    config = _config()
    entry = config._config[name]
    if pass_ in split(entry.default):
        entry.default = _only_or_join([p for p in split(entry.default) if p is not pass_])
    overridden, value = _override(entry)
    if overridden and pass_ in split(value):
        setattr(config, name, _only_or_join([p for p in split(value) if p is not pass_]))


def _only_or_join(passes: list[Any]) -> Any:
    return passes[0] if len(passes) == 1 else join(passes)


def run_passes_before_cache_lookup(on: bool) -> None:
    """Let pre-grad passes run on every compile, cache hit or not (what 2.11 always does)."""
    entry = _config()._config.get(TIMING)
    if entry is not None:
        entry.default = "early" if on else "default"


def passes_run_before_cache_lookup() -> bool:
    """False if the pass in progress runs after a cache miss only, because somebody asked for that timing."""
    from torch._inductor import codecache

    resolve = getattr(codecache, "resolve_pre_grad_pass_timing", None)
    return resolve is None or resolve() == "early"


def compile_id() -> str:
    """Dynamo's name of the compile in progress, as in its own logs: "0/0"."""
    from torch import _guards

    context = getattr(_guards, "CompileContext", None)
    return str((context and context.current_compile_id()) or "?")


def register_backend(name: str, backend: Callable[..., Any]) -> None:
    """Make ``torch.compile(backend=name)`` work without the package's entry point being installed."""
    from torch._dynamo.backends import registry

    if name not in getattr(registry, "_COMPILER_FNS", ()):
        registry.register_backend(backend, name=name)


def inductor_backend(mode: str | None, options: dict[str, Any] | None) -> Callable[..., Any]:
    """What torch.compile makes of backend="inductor" with these arguments; checks them as torch.compile does."""
    import torch

    wrapper = getattr(torch, "_TorchCompileInductorWrapper", None)
    if wrapper is not None:
        return wrapper(mode, options, None)
    patches = {**(torch._inductor.list_mode_options(mode) if mode else {}), **(options or {})}
    return partial(torch._dynamo.lookup_backend("inductor"), **({"config_patches": patches} if patches else {}))


def subgraphs(gm: Any) -> Iterator[tuple[Any, Any]]:
    """The bodies of a graph's higher-order ops, innermost first: the order in which Inductor runs pre-grad passes.

    With each the module that runs it.
    """
    from torch._inductor.compile_fx import _get_subgraph_names

    for name in _get_subgraph_names(gm):
        body = getattr(gm, name)
        yield from subgraphs(body)
        yield body, gm


def outer_module(graph: Any) -> Any:
    """The module that runs ``graph`` as a body of a higher-order op, while a pre-grad pass works on it, or None.

    Inductor descends into bodies by calling itself, and tells the pass nothing; so its calls are looked at.
    """
    frame: Any = sys._getframe(1)
    inside = False
    while frame is not None:
        if frame.f_code.co_name == "_recursive_pre_grad_passes":
            module = frame.f_locals.get("gm")
            if inside:
                return module
            if getattr(module, "graph", None) is not graph:
                return None
            inside = True
        frame = frame.f_back
    return None


def original(model: Any) -> Any:
    """What torch.compile was given, for a compiled module or function; anything else as it is."""
    model = getattr(model, "_orig_mod", model)
    return getattr(model, "_torchdynamo_orig_callable", model)


@contextmanager
def tracing_aside(model: Any) -> Iterator[list[str]]:
    """A block that may run Dynamo on ``model`` and leave no trace in it; gives the reasons of graph breaks.

    Code that had not been compiled before is made fresh again, and counters and the record of sizes seen (which decides
    what becomes dynamic) are put back.  Code that had been compiled keeps its compiled versions, plus one.
    """
    import torch
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
    from torch._dynamo import convert_frame, pgo
    from torch._dynamo.utils import counters

    fresh: list[CodeType] = []

    def note(code: CodeType, new_code: CodeType) -> None:
        if not _debug_get_cache_entry_list(code):
            fresh.append(code)

    graph_breaks: list[str] = []
    counters_before = copy.deepcopy(dict(counters))
    sizes = pgo.get_code_state()
    sizes_before = copy.deepcopy(dict(sizes))
    limits = {
        name: 1 << 20
        for name in ("recompile_limit", "accumulated_recompile_limit")
        if hasattr(torch._dynamo.config, name)
    }
    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(limits))
        hook = convert_frame.register_bytecode_hook(note)
        stack.callback(hook.remove)
        compiled_call = getattr(model, "_compiled_call_impl", None)
        if compiled_call is not None:  # Module.compile(): calling the module would run that compiled version
            model._compiled_call_impl = None
            stack.callback(setattr, model, "_compiled_call_impl", compiled_call)
        counters.clear()
        try:
            yield graph_breaks
        finally:
            for reason, count in counters["graph_break"].items():
                graph_breaks.extend([reason.strip().splitlines()[0]] * count)
            counters.clear()
            counters.update(counters_before)
            sizes.clear()
            sizes.update(sizes_before)
            for code in fresh:
                reset_code(code)
