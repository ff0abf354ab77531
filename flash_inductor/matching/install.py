"""The switch: whether torch.compile's graphs are rewritten, and the passes' place in Inductor's configuration.

Importing this must not import torch._inductor; the passes are put in when somebody does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from .._compat import hooks, unsupported
from ..config import get_config, override, set_config

_lock = threading.RLock()
_on = False
_held_off: ContextVar[bool] = ContextVar("flash_inductor_held_off", default=False)


def is_enabled() -> bool:
    """True between :func:`enable` and :func:`disable`, in every thread."""
    return _on


def enable(*, include: str | Sequence[str] | None = None, exclude: str | Sequence[str] | None = None) -> None:
    """Rewrite the attention of everything that ``torch.compile`` compiles from now on, in every thread.

    ``include`` and ``exclude`` set the settings of these names: patterns for the sites to rewrite and to leave alone,
    such as ``"model.layers.*"`` (paths of modules), ``"LlamaAttention"`` (their classes) or ``"vit.py*"`` (places in
    the code).  None keeps what is set, ``()`` takes back what was.

    Other passes you have set in ``torch._inductor.config.pre_grad_custom_pass`` keep running, after this one.  Setting
    that option afterwards replaces this pass: set :func:`compose` of yours.  What is compiled already stays as it is
    (``torch._dynamo.reset()`` drops it).

    On a torch that isn't supported one warning is logged, and everything is compiled as without this package.
    """
    patterns: dict[str, Any] = {name: p for name, p in (("include", include), ("exclude", exclude)) if p is not None}
    if patterns:
        set_config(replace(get_config(), **patterns))
    _switch(True)


def disable() -> None:
    """Undo :func:`enable`: from now on ``torch.compile`` gives what it gives without this package.

    What is compiled already stays as it is (``torch._dynamo.reset()`` drops it).
    """
    _switch(False)


@contextmanager
def enabled(
    *, include: str | Sequence[str] | None = None, exclude: str | Sequence[str] | None = None
) -> Iterator[None]:
    """``with enabled(): ...`` - :func:`enable` for a block of code.  Process-wide, like the switch itself."""
    before = is_enabled()
    with override():  # puts back the patterns
        enable(include=include, exclude=exclude)
        try:
            yield
        finally:
            _switch(before)


def compose(custom_pass: Any) -> Any:
    """A value for ``torch._inductor.config.pre_grad_custom_pass`` that runs this package's pass, then ``custom_pass``.

    ``custom_pass`` is anything that option takes.  Also for one compile only:
    ``torch.compile(model, options={"pre_grad_custom_pass": flash_inductor.compose(mine)})``.
    """
    both = attempt(_compose, custom_pass)
    return custom_pass if both is None else both


def _compose(custom_pass: Any) -> Any:
    from .fusion_pass import FUSION

    return hooks.join((FUSION, *(p for p in hooks.split(custom_pass) if p is not FUSION)))


@contextmanager
def held_off() -> Iterator[None]:
    """A block in which the pass does nothing, in this thread: its graphs have been rewritten already."""
    token = _held_off.set(True)
    try:
        yield
    finally:
        _held_off.reset(token)


def is_held_off() -> bool:
    return _held_off.get()


def install_when_inductor_is_imported() -> None:
    """Called once, by ``import flash_inductor``."""
    hooks.when_imported(hooks.CONFIG, sync)


def _switch(on: bool) -> None:
    global _on
    with _lock:
        _on = on
        if hooks.is_imported(hooks.CONFIG):
            sync()


def sync() -> None:
    """Put the passes into Inductor's configuration, as the switch says."""
    attempt(_sync)


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, or None on a torch that isn't supported, which the call may be the first to find out.

    Raises what a private name that moved raises only if ``Config.strict`` is set.
    """
    if unsupported.is_unsupported():
        return None
    try:
        return function(*args)
    except unsupported.MOVED as error:
        if get_config().strict:
            raise
        unsupported.give_up(error)
        return None


def _sync() -> None:
    from . import fusion_pass

    if not hasattr(fusion_pass, "KEY"):
        return  # it is being imported, and imported Inductor to define its passes: it calls again at its end
    with _lock:
        hooks.add_pass(hooks.POST_GRAD, fusion_pass.KEY)
        if _on:
            hooks.add_pass(hooks.PRE_GRAD, fusion_pass.FUSION)
        else:
            hooks.drop_pass(hooks.PRE_GRAD, fusion_pass.FUSION)
        # A rewrite may read the value of a mask held in a buffer.  The guard on it lives in this process only, so the
        # pass has to run for a graph whose code comes from the cache too; the key is then that of the rewritten graph.
        hooks.run_passes_before_cache_lookup(_on)
