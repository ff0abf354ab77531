"""A torch that this package doesn't know: one warning, and torch.compile runs as without the package.

Too old is told by the version.  Too new is told by private names that have moved, at the first use of one of them.
"""

from __future__ import annotations

import logging
import re

log = logging.getLogger("flash_inductor")

OLDEST, NEWEST_TESTED = (2, 11), "2.15"
MOVED = (ImportError, AttributeError, KeyError, TypeError)  # what the use of a name that moved, or changed, raises
_why: str | None = None


def is_unsupported() -> bool:
    """Whether nothing is to be done to what is compiled.  Warns when it first says so."""
    if _why is None and (words := _too_old()) is not None:
        _give_up(words)
    return _why is not None


def why() -> str:
    """What has been said of this torch; empty if nothing."""
    return _why or ""


def give_up(error: BaseException) -> None:
    """A private name of torch moved: from now on :func:`is_unsupported`."""
    import torch

    oldest = ".".join(map(str, OLDEST))
    _give_up(
        f"torch {torch.__version__} is not supported by this version of flash_inductor "
        f"({type(error).__name__}: {error}): torch.compile runs as without it. Tested are torch {oldest} to "
        f"{NEWEST_TESTED}; please report this (FLASH_INDUCTOR_STRICT=1 raises the error)"
    )


def _too_old() -> str | None:
    import torch

    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if numbers is None or tuple(map(int, numbers.groups())) >= OLDEST:
        return None
    return (
        f"torch {torch.__version__} is too old for flash_inductor: torch.compile runs as without it. Install torch "
        f"{'.'.join(map(str, OLDEST))} or newer"
    )


def _give_up(words: str) -> None:
    global _why
    if _why is None:
        _why = words
        log.warning(words)
