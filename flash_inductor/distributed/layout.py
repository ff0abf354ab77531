"""Which positions of a sequence each rank holds."""

from __future__ import annotations

from typing import NamedTuple

LAYOUTS = ("contiguous", "zigzag")


class Span(NamedTuple):
    """Positions ``start <= i < stop``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def __and__(self, other: Span) -> Span:  # type: ignore[override]
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))


def chunks(length: int, ranks: int, rank: int, layout: str) -> tuple[Span, ...]:
    """The positions that ``rank`` of ``ranks`` holds of a sequence of ``length``, in the order in which it holds them.

    "contiguous": the rank-th of ``ranks`` parts.  "zigzag": the rank-th and the rank-th last of ``2 * ranks`` parts, so
    that under a causal mask all ranks have the same work.  Parts differ by one position at most, the longer ones first.

    Raises ValueError for another layout, or if a part would be empty.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
    # Both parts of a single rank are one.
    parts = ranks if layout == "contiguous" or ranks == 1 else 2 * ranks
    if length < parts:
        raise ValueError(
            f"length: expected at least {parts} positions for {ranks} ranks in layout {layout!r}, got {length}"
        )
    if parts == ranks:
        return (_part(length, ranks, rank),)
    return _part(length, parts, rank), _part(length, parts, parts - 1 - rank)


def local_length(length: int, ranks: int, rank: int, layout: str) -> int:
    """How many positions ``rank`` holds."""
    return sum(span.size for span in chunks(length, ranks, rank, layout))


def _part(length: int, parts: int, index: int) -> Span:
    size, longer = divmod(length, parts)
    start = index * size + min(index, longer)
    return Span(start, start + size + (index < longer))
