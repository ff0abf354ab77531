"""Inductor's own attention patterns, made to replace only what they mean.

Before torch 2.15 these patterns ("sfdp") are matched with every integer a wildcard, and nobody looks again: a softmax
over another dim, any permutation and five dims pass for attention, which gives wrong numbers.  Each entry has a check
that would trace the pattern with the shapes at hand and compare exactly, but skips that for patterns that come traced
already, as these do.  Here they get the same check without the traced pattern, which is what 2.15 does.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

log = logging.getLogger("flash_inductor")

MODULE = "torch._inductor.fx_passes.fuse_attention"
_TRACED = "search_fn_pattern"


class Exactly:
    """An entry's check, exact while ``active`` says so."""

    def __init__(self, stock: Callable[[Any], Any], exact: Callable[[Any], Any] | None, active: Callable[[], bool]):
        self.stock, self.exact, self.active = stock, exact, active

    def __call__(self, match: Any) -> Any:
        if not self.active():
            return self.stock(match)
        if self.exact is None:
            return False
        try:
            return self.exact(match)
        except Exception as error:  # tracing the pattern fails on shapes that it wasn't made for
            log.debug("Inductor's attention pattern doesn't fit: %s", error)
            return False


def without_traced_pattern(check: FunctionType) -> Callable[[Any], Any] | None:
    """The same check made to trace its pattern, or None if it isn't understood."""
    names = check.__code__.co_freevars
    if _TRACED not in names or check.__closure__ is None:
        return None
    cells = [CellType(None) if n == _TRACED else c for n, c in zip(names, check.__closure__, strict=True)]
    return FunctionType(check.__code__, check.__globals__, check.__name__, check.__defaults__, tuple(cells))


def _free(check: Any, name: str) -> Any:
    names = getattr(getattr(check, "__code__", None), "co_freevars", ())
    return check.__closure__[names.index(name)].cell_contents if name in names else None


def check_exactly(active: Callable[[], bool]) -> None:
    """Have the attention patterns checked exactly whenever ``active()``; torch that does so itself is left as it is."""
    module = importlib.import_module(MODULE)
    register = getattr(module, "_sfdp_init", None)
    if register is None or hasattr(register, "checks_exactly"):
        return

    @functools.wraps(register)
    def registered(*args: Any, **kwargs: Any) -> Any:
        result = register(*args, **kwargs)
        _check_entries(active)
        return result

    registered.checks_exactly = True  # type: ignore[attr-defined]
    module._sfdp_init = registered  # type: ignore[attr-defined]


def _check_entries(active: Callable[[], bool]) -> None:
    from torch._inductor.fx_passes import joint_graph

    for entries in joint_graph.patterns.patterns.values():
        for entry in entries:
            check: Any = entry.extra_check
            if getattr(_free(check, "search_fn"), "__module__", None) != MODULE:
                continue
            if _free(check, _TRACED) is not None:
                entry.extra_check = Exactly(check, without_traced_pattern(check), active)
