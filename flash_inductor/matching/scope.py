"""Which sites the user wants rewritten: ``Config.include`` and ``Config.exclude``."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import fx

from ..config import get_config
from . import locate


def left_out(node: fx.Node, location: str | None) -> str | None:
    """Why a site at ``node`` isn't to be rewritten, as a sentence for the report; None if it is."""
    config = get_config()
    if not config.include and not config.exclude:
        return None
    names = [name for around in locate.modules(node) for name in around if name]
    names += [location] if location else []
    here = f"{names[-1]!r}" if names else "code outside of any module"
    hit = _matching(config.exclude, names)
    if hit is not None:
        return f"it matches {hit!r} of exclude; take that out to have it replaced"
    if config.include and _matching(config.include, names) is None:
        return f"it matches nothing of include={list(config.include)}; add a pattern for {here} to have it replaced"
    return None


def _matching(patterns: Sequence[str], names: Sequence[str]) -> str | None:
    return next((p for p in patterns if any(fnmatchcase(name, p) for name in names)), None)
