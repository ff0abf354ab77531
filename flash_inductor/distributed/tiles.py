"""Attention calls for a grid of cells, as few as possible.

A cell is a span of queries against a span of keys, each of which lies together in the sequence.  Next to each other in
memory they need not be so in the sequence, so each cell has a band of its own, and one call can do for several only if
one band says the same of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..spec import MaskSpec
from .layout import Span


@dataclass(frozen=True)
class Cell:
    """Query ``i`` of ``queries`` sees key ``j`` of ``keys`` iff ``lower <= j - i <= upper``.

    ``seeing`` and ``seen``: which of them see a key, and are seen by a query, at all.
    """

    queries: Span
    keys: Span
    lower: int | None
    upper: int | None
    seeing: Span
    seen: Span

    @property
    def is_empty(self) -> bool:
        return self.seeing.size == 0 or self.seen.size == 0


@dataclass(frozen=True)
class Tile:
    """One attention call: rows of the queries, rows of the keys, and the band counted from the first of each."""

    queries: Span
    keys: Span
    band: MaskSpec

    @property
    def pairs(self) -> int:
        """How many pairs are visible."""
        lower, upper = self.band.lower, self.band.upper
        rows, columns = self.queries.size, self.keys.size
        hidden_right = 0 if upper is None else _triangle(rows, columns, columns - 1 - upper)
        hidden_left = 0 if lower is None else _triangle(rows, columns, rows - 1 + lower)
        return rows * columns - hidden_right - hidden_left


def _triangle(rows: int, columns: int, count: int) -> int:
    """Pairs within ``count`` diagonals of a corner that the main diagonal doesn't meet."""

    def full(n: int) -> int:
        return n * (n + 1) // 2 if n > 0 else 0

    return full(count) - full(count - rows) - full(count - columns) + full(count - rows - columns)


def join(grid: Sequence[Sequence[Cell]]) -> tuple[Tile, ...]:
    """Tiles for cells by query span and key span: one for all if a band allows, else for each query span, else each."""
    busy = [row for row in grid if not all(cell.is_empty for cell in row)]
    if not busy:
        return ()
    tile = _fit([cell for row in grid for cell in row])
    if tile is not None:
        return (tile,)
    tiles = []
    for row in busy:
        tile = _fit(row)
        if tile is not None:
            tiles.append(tile)
        else:
            tiles.extend(tile for cell in row if not cell.is_empty and (tile := _fit([cell])))
    return tuple(tiles)


def _fit(cells: Sequence[Cell]) -> Tile | None:
    """One call for these cells and for all that lies between them, if there is a band for it."""
    busy = [cell for cell in cells if not cell.is_empty]
    queries = Span(min(c.seeing.start for c in busy), max(c.seeing.stop for c in busy))
    keys = Span(min(c.seen.start for c in busy), max(c.seen.stop for c in busy))
    lowest: list[float] = [-math.inf, math.inf]  # what the lower bound may be
    highest: list[float] = [-math.inf, math.inf]  # and the upper
    for cell in cells:
        rows, columns = cell.queries & queries, cell.keys & keys
        if not rows.size or not columns.size:
            continue
        first, last = columns.start - (rows.stop - 1), columns.stop - 1 - rows.start  # of j - i
        lower = -math.inf if cell.lower is None else cell.lower
        upper = math.inf if cell.upper is None else cell.upper
        if upper < first or lower > upper:
            _narrow(highest, -math.inf, first - 1)
        elif lower > last:
            _narrow(lowest, last + 1, math.inf)
        else:
            _narrow(highest, *((last, math.inf) if upper >= last else (upper, upper)))
            _narrow(lowest, *((-math.inf, first) if lower <= first else (lower, lower)))
    if lowest[0] > lowest[1] or highest[0] > highest[1]:
        return None
    shift = queries.start - keys.start  # from rows and columns of the grid to those of the tile
    upper_bound = None if highest[1] == math.inf else int(highest[1]) + shift
    lower_bound = None if lowest[0] == -math.inf else int(lowest[0]) + shift
    return Tile(queries, keys, MaskSpec(lower_bound, upper_bound))


def _narrow(bounds: list[float], low: float, high: float) -> None:
    bounds[0], bounds[1] = max(bounds[0], low), min(bounds[1], high)
