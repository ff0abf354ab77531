"""What a mask function of positions means, found out by calling it with symbols instead of tensors.

Libraries describe masks by functions ``visible(batch, head, query, key)`` of indices (transformers.masking_utils, the
mask_mod of FlexAttention).  Called with the symbols below, such a function gives a conjunction of terms: a band,
segments, padded keys.  One that does anything else with an index raises :class:`NotStructured`; nothing is guessed from
names.  Works while Dynamo traces, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Int = Any  # int | torch.SymInt
QUERY, KEY, BATCH, HEAD = "query", "key", "batch", "head"


class NotStructured(Exception):
    """The mask function does what these symbols don't express."""


class _Symbol:
    def __bool__(self) -> bool:
        raise NotStructured("a decision by the value of an index")


@dataclass(frozen=True, eq=False)
class Terms(_Symbol):
    """A conjunction: lower <= key - query position <= upper, all ``segments`` equal, all ``keys`` true.

    Attributes:
        lower, upper: bounds on the distance, None for unbounded.
        remapped: None, or the positions [B, N] that the bounds are about in place of 0, 1, 2, ...
        segments: pairs of a query's and a key's :class:`Position`, visible where equal.
        keys: bool tensors [B, number of keys], visible where True.
    """

    lower: Int | None = None
    upper: Int | None = None
    remapped: Tensor | None = None
    segments: tuple[tuple[Position, Position], ...] = ()
    keys: tuple[Tensor, ...] = ()

    def __and__(self, other: Any) -> Terms:
        if not isinstance(other, Terms):
            raise NotStructured("a mask combined with a tensor")
        bounded = [x for x in (self, other) if x.lower is not None or x.upper is not None]
        if len(bounded) == 2 and self.remapped is not other.remapped:
            raise NotStructured("distances of two kinds of positions")
        return Terms(
            _tighter(self.lower, other.lower, max),
            _tighter(self.upper, other.upper, min),
            bounded[0].remapped if bounded else None,
            self.segments + other.segments,
            self.keys + other.keys,
        )

    __rand__ = __and__

    device = None  # only handed back to ``to``

    def to(self, *_: Any, **__: Any) -> Terms:
        """A move to another device or dtype, which symbols have none of."""
        return self

    def __or__(self, other: Any) -> Any:
        raise NotStructured("a union of masks")

    __ror__ = __invert__ = __xor__ = __or__  # type: ignore[assignment]


def _tighter(a: Int | None, b: Int | None, choose: Callable[[Int, Int], Int]) -> Int | None:
    if a is None or b is None:
        return b if a is None else a
    return choose(a, b)


@dataclass(frozen=True, eq=False)
class Position(_Symbol):
    """The position of a query or key, plus or minus numbers, divided down once.

    ``values`` [B, N] holds positions other than 0, 1, 2, ...; ``per_batch``, each [B], are subtracted; ``divisor``
    divides last.
    """

    axis: str
    values: Tensor | None = None
    offset: Int = 0
    per_batch: tuple[Tensor, ...] = ()
    divisor: Int | None = None

    def new_ones(self, *_: Any, **__: Any) -> Terms:
        """``query_index.new_ones((), dtype=bool)``: everything is visible."""
        return Terms()

    def __add__(self, other: Any) -> Position:
        return self._moved(other, 1)

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, Position):
            return _Distance(self, other)
        if isinstance(other, _PerBatch):
            self._undivided()
            return Position(self.axis, self.values, self.offset, (*self.per_batch, other.values))
        return self._moved(other, -1)

    def _moved(self, by: Any, sign: int) -> Position:
        self._undivided()
        if not isinstance(by, (int, torch.SymInt)):
            raise NotStructured("a position plus a tensor")
        return Position(self.axis, self.values, self.offset + sign * by, self.per_batch)

    def _undivided(self) -> None:
        if self.divisor is not None:
            raise NotStructured("arithmetic on chunk numbers")

    def __floordiv__(self, divisor: Any) -> Position:
        self._undivided()
        if not isinstance(divisor, int) or divisor < 1:
            raise NotStructured("division by what is no positive number")
        return Position(self.axis, self.values, self.offset, self.per_batch, divisor)

    def __eq__(self, other: Any) -> Any:
        if not isinstance(other, Position) or {self.axis, other.axis} != {QUERY, KEY}:
            raise NotStructured("an equality that isn't between a query and a key")
        return Terms(segments=((self, other) if self.axis == QUERY else (other, self),))

    __hash__ = None  # type: ignore[assignment]

    def __ne__(self, other: Any) -> Any:
        raise NotStructured("an inequality")

    def __le__(self, other: Any) -> Terms:
        return _at_most(self, other, 0)

    def __lt__(self, other: Any) -> Terms:
        return _at_most(self, other, -1)

    def __ge__(self, other: Any) -> Terms:
        if isinstance(other, int) and other <= 0 and self.values is None and self.is_plain():
            return Terms()  # positions are never negative: the way to write "everything"
        return _at_most(other, self, 0)

    def __gt__(self, other: Any) -> Terms:
        return _at_most(other, self, -1)

    def is_plain(self) -> bool:
        """Whether nothing was done to it."""
        return _is_zero(self.offset) and not self.per_batch and self.divisor is None


def _at_most(a: Any, b: Any, by: int) -> Terms:
    """a <= b + by, for the positions of a query and a key."""
    if not (isinstance(a, Position) and isinstance(b, Position)) or {a.axis, b.axis} != {QUERY, KEY}:
        raise NotStructured("a comparison that isn't between a query and a key")
    if a.per_batch or b.per_batch or a.divisor is not None or b.divisor is not None or a.values is not b.values:
        raise NotStructured("a comparison of derived positions")
    bound = b.offset + by - a.offset
    if a.axis == KEY:
        return Terms(upper=bound, remapped=a.values)
    return Terms(lower=-bound, remapped=a.values)


@dataclass(frozen=True, eq=False)
class _Distance(_Symbol):
    """Query minus key position or the reverse."""

    first: Position
    second: Position

    def __abs__(self) -> _AbsoluteDistance:
        return _AbsoluteDistance(self)


@dataclass(frozen=True, eq=False)
class _AbsoluteDistance(_Symbol):
    distance: _Distance

    def __le__(self, limit: Any) -> Terms:
        return self._below(limit)

    def __lt__(self, limit: Any) -> Terms:
        return self._below(limit, 1)

    def _below(self, limit: Any, less: int = 0) -> Terms:
        if not isinstance(limit, (int, torch.SymInt)):
            raise NotStructured("a distance compared with what is no number")
        first, second = self.distance.first, self.distance.second
        return (first <= second + (limit - less)) & (second <= first + (limit - less))


@dataclass(frozen=True, eq=False)
class _PerBatch(_Symbol):
    """``tensor[batch]``."""

    values: Tensor


@dataclass(frozen=True, eq=False)
class _Other(_Symbol):
    """The batch or head index: fit for indexing only."""

    axis: str


class _Indexing(TorchFunctionMode):
    """``tensor[batch]`` and ``tensor[batch, position]`` with symbols."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(x, (Position, _Other)) for x in index):
                return _select(args[0], index)
        return func(*args, **(kwargs or {}))


def _select(tensor: Tensor, index: tuple[Any, ...]) -> Any:
    if not isinstance(index[0], _Other) or index[0].axis != BATCH or tensor.dim() != len(index):
        raise NotStructured("a tensor indexed by what is no batch entry")
    if len(index) == 1:
        return _PerBatch(tensor)
    position = index[1]
    if len(index) != 2 or not (isinstance(position, Position) and position.values is None and position.is_plain()):
        raise NotStructured("a tensor indexed by derived positions")
    if tensor.dtype is torch.bool:
        if position.axis == KEY:
            return Terms(keys=(tensor,))
        raise NotStructured("a mask of queries")
    if tensor.is_floating_point():
        raise NotStructured("positions that are no integers")
    return Position(position.axis, values=tensor)


def _is_zero(offset: Int) -> bool:
    return isinstance(offset, int) and offset == 0


def terms_of(mask_function: Callable[[Any, Any, Any, Any], Any]) -> Terms:
    """What ``mask_function(batch, head, query, key)`` lets see, positions counted from 0.

    Raises NotStructured if it isn't a conjunction of what :class:`Terms` holds.
    """
    try:
        with _Indexing():
            found = mask_function(_Other(BATCH), _Other(HEAD), Position(QUERY), Position(KEY))
    except (TypeError, AttributeError, IndexError) as error:  # an operation that the symbols don't have
        raise NotStructured(str(error)) from error
    if not isinstance(found, Terms):
        raise NotStructured(f"a result that is no mask: {type(found).__name__}")
    return found
