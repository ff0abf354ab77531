"""Who sends which keys to whom, and what each rank computes with them.

Keys go from the rank that holds them straight to the ranks whose queries see them: in step s of a ring every rank r has
those of rank r - s.  Passing them on from neighbour to neighbour moves as many bytes at best, and more where a mask
hides them from some ranks on the way: half of what causal attention would pass on in the zig-zag layout is such.

A plan follows from its arguments alone, so ranks agree on it without asking each other.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..spec import MaskSpec
from .layout import Span, chunks
from .tiles import Cell, Tile, join

METHODS = ("ring", "gather")


@dataclass(frozen=True)
class Piece:
    """Keys of a step that lie together: ``rows`` of what ``rank`` contributes (of its own keys, if it is this rank)."""

    rank: int
    rows: Span
    positions: Span


@dataclass(frozen=True)
class Step:
    """An exchange of keys and what is computed with what it brings.

    Attributes:
        send: for each rank that gets keys of this rank, which rows of them.
        receive: for each rank that this one gets keys of, how many rows.
        pieces: the keys of this step, in the order in which the tiles number them.
        tiles: the attention calls.
    """

    send: tuple[tuple[int, tuple[Span, ...]], ...]
    receive: tuple[tuple[int, int], ...]
    pieces: tuple[Piece, ...]
    tiles: tuple[Tile, ...]
    exchanges: bool = True  # every rank takes part in an exchange, also one that neither sends nor receives


@dataclass(frozen=True)
class Plan:
    """What one rank does."""

    ranks: int
    rank: int
    rows: int  # of queries, and of keys, that the rank holds
    steps: tuple[Step, ...]

    @property
    def rows_sent(self) -> int:
        return sum(span.size for step in self.steps for _, spans in step.send for span in spans)

    @property
    def rows_received(self) -> int:
        return sum(rows for step in self.steps for _, rows in step.receive)

    @property
    def pairs(self) -> int:
        """How many pairs of a query and a key are visible in the tiles."""
        return sum(tile.pairs for step in self.steps for tile in step.tiles)


@dataclass(frozen=True)
class Sequence:
    """A sequence split over ranks, and the band of keys that its queries see."""

    length: int
    ranks: int
    layout: str
    band: MaskSpec

    def spans(self, rank: int) -> tuple[Span, ...]:
        return _spans(self, rank)

    def rows_of(self, rank: int, positions: Span) -> Span:
        """Where a rank holds these positions, which lie in one of its spans."""
        start = 0
        for span in self.spans(rank):
            if span.start <= positions.start and positions.stop <= span.stop:
                return Span(start + positions.start - span.start, start + positions.stop - span.start)
            start += span.size
        raise ValueError(f"rank {rank} doesn't hold {positions}")

    def seen(self, rank: int, owner: int) -> list[Span]:
        """The positions that ``owner`` holds and some query of ``rank`` sees, in the order in which it holds them."""
        return _seen(self, rank, owner)

    def sources(self, rank: int) -> set[int]:
        """The ranks that hold what some query of ``rank`` sees."""
        spans, owners = _owners(self)
        found: set[int] = set()
        for wanted in map(self.sees, self.spans(rank)):
            if wanted.size:
                first = bisect(spans, (wanted.start, self.length + 1)) - 1
                found.update(owners[first : bisect(spans, (wanted.stop - 1, self.length + 1))])
        return found

    def sees(self, queries: Span) -> Span:
        """The positions that some of these queries see."""
        lower, upper = self.band.lower, self.band.upper
        return Span(0, self.length) & Span(
            0 if lower is None else queries.start + lower, self.length if upper is None else queries.stop + upper
        )

    def seen_by(self, keys: Span) -> Span:
        """The queries that see some of these keys."""
        lower, upper = self.band.lower, self.band.upper
        return Span(0, self.length) & Span(
            0 if upper is None else keys.start - upper, self.length if lower is None else keys.stop - lower
        )


@lru_cache(maxsize=1 << 16)
def _spans(sequence: Sequence, rank: int) -> tuple[Span, ...]:
    return chunks(sequence.length, sequence.ranks, rank, sequence.layout)


@lru_cache(maxsize=64)
def _owners(sequence: Sequence) -> tuple[list[Span], list[int]]:
    """Every span in the order of positions, and who holds it."""
    pairs = sorted((span, rank) for rank in range(sequence.ranks) for span in sequence.spans(rank))
    return [span for span, _ in pairs], [rank for _, rank in pairs]


@lru_cache(maxsize=1 << 16)
def _seen(sequence: Sequence, rank: int, owner: int) -> list[Span]:
    wanted = [sequence.sees(span) for span in sequence.spans(rank)]
    found: list[Span] = []
    for span in sequence.spans(owner):
        for part in sorted(part for seen in wanted if (part := span & seen).size):
            if found and found[-1].start >= span.start and part.start <= found[-1].stop:
                found[-1] = Span(found[-1].start, max(found[-1].stop, part.stop))
            else:
                found.append(part)
    return found


@lru_cache(maxsize=4096)
def make_plan(sequence: Sequence, rank: int, method: str, *, backward: bool = False) -> Plan:
    """What ``rank`` does: "ring", a step for each rank whose keys somebody sees, or "gather", all at once.

    The backward sends as much as the forward and then as much back.  Its ring computes with the rank's own keys in two
    steps, the first and the last: behind one hides the first transfer, behind the other the last gradients.

    Raises ValueError for another method.
    """
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, or 'auto', got {method!r}")
    ranks = sequence.ranks
    if method == "gather":
        others = [r for r in range(ranks) if r != rank]
        steps = [_step(sequence, rank, [rank, *others], others)]
    else:
        shifts = _shifts(sequence)
        of_others = [_step(sequence, rank, [(rank - shift) % ranks], [(rank + shift) % ranks]) for shift in shifts]
        if backward and shifts:
            early, late = _halves(sequence.spans(rank))
            steps = [
                _step(sequence, rank, [rank], [], early),
                *of_others,
                _step(sequence, rank, [rank], [], late),
            ]
        else:
            steps = [_step(sequence, rank, [rank], []), *of_others]
    rows = sum(span.size for span in sequence.spans(rank))
    return Plan(ranks, rank, rows, tuple(steps))


@lru_cache(maxsize=4096)
def _shifts(sequence: Sequence) -> tuple[int, ...]:
    """The steps of a ring in which some rank needs keys, the same on every rank."""
    ranks = sequence.ranks
    found: set[int] = set()
    for rank in range(ranks):
        found.update((rank - owner) % ranks for owner in sequence.sources(rank))
        if len(found - {0}) == ranks - 1:
            break
    return tuple(sorted(found - {0}))


def _halves(spans: tuple[Span, ...]) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Early and late queries of a rank."""
    if len(spans) > 1:
        return spans[:1], spans[1:]
    middle = (spans[0].start + spans[0].stop) // 2
    return (Span(spans[0].start, middle),), (Span(middle, spans[0].stop),)


def _step(
    sequence: Sequence, rank: int, sources: list[int], targets: list[int], queries: tuple[Span, ...] | None = None
) -> Step:
    """``queries``: those that take part, if not all of the rank."""
    send = []
    for target in targets:
        parts = sequence.seen(target, rank)
        if parts:
            send.append((target, tuple(sequence.rows_of(rank, part) for part in parts)))
    receive, pieces = [], []
    for source in sources:
        at = 0
        for part in sequence.seen(rank, source):
            rows = sequence.rows_of(rank, part) if source == rank else Span(at, at + part.size)
            pieces.append(Piece(source, rows, part))
            at += part.size
        if source != rank and at:
            receive.append((source, at))
    if len(sources) > 1:
        pieces.sort(key=lambda piece: piece.positions)
    # What an exchange brings from one rank stays in the order of its rows, so that nothing has to be copied.
    tiles = _tiles(sequence, rank, pieces, queries or sequence.spans(rank))
    return Step(tuple(send), tuple(receive), tuple(pieces), tiles, bool(targets))


def _tiles(sequence: Sequence, rank: int, pieces: list[Piece], spans: tuple[Span, ...]) -> tuple[Tile, ...]:
    cells: list[list[Cell]] = []
    for queries in spans:
        row = sequence.rows_of(rank, queries).start
        of_queries, column = [], 0
        for piece in pieces:
            keys = piece.positions
            who = queries & sequence.seen_by(keys)
            what = keys & sequence.sees(queries)
            band: Any = sequence.band
            of_queries.append(
                Cell(
                    Span(row, row + queries.size),
                    Span(column, column + keys.size),
                    # In rows and columns, a key at position p of the sequence is at column p - keys.start + column.
                    band.lower if band.lower is None else band.lower + (queries.start - row) - (keys.start - column),
                    band.upper if band.upper is None else band.upper + (queries.start - row) - (keys.start - column),
                    Span(row + who.start - queries.start, row + who.stop - queries.start),
                    Span(column + what.start - keys.start, column + what.stop - keys.start),
                )
            )
            column += keys.size
        cells.append(of_queries)
    return join(cells)
