"""Keeps Inductor's own attention patterns from replacing what isn't attention, while this package is on."""

from __future__ import annotations

from .. import config as settings
from .._compat import hooks, stock_patterns
from . import install


def is_checked() -> bool:
    """Whether a compile in this thread, now, checks those patterns exactly."""
    return settings.get_config().check_stock_patterns and (install.is_enabled() or install.is_held_off())


def install_check() -> None:
    """Called once; waits until Inductor's patterns are imported."""
    hooks.when_imported(stock_patterns.MODULE, lambda: stock_patterns.check_exactly(is_checked))
