"""How reports show an error."""

from __future__ import annotations


def in_one_line(error: BaseException) -> str:
    """The error's type and the first line of its message."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
