"""Abstract values for masks: what is known of a tensor at every index, for every size it may have.

A value speaks about the indices of its own dims.  ``Affine`` is an exact integer, linear in them; ``TwoValued`` says
where the tensor holds one number and where another; ``Top`` says nothing, and why.  Symbolic sizes appear only in
constants and are only added, subtracted and multiplied by ints, which puts no guard on them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

NEGLIGIBLE = -1e4  # a score this far below the others has no weight left after softmax
Int = Any  # int | torch.SymInt
Shape = Sequence[Int]


def simplify(x: Int) -> Int:
    """A SymInt that is a plain number becomes an int."""
    if isinstance(x, torch.SymInt):
        expr = x.node.expr
        return int(expr) if expr.is_number else x
    return int(x)


def same(a: Int, b: Int) -> bool:
    """Whether two sizes are equal at every run of the graph; no guard is added."""
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        return isinstance(simplify(a - b), int) and simplify(a - b) == 0
    return int(a) == int(b)


def known(condition: Any) -> bool:
    """Whether a comparison holds at every run of the graph; no guard is added."""
    return bool(statically_known_true(condition))


@dataclass(frozen=True, eq=False)
class Linear:
    """``sum_d coefs[d] * index_d + const``; ``coefs`` are ints, ``const`` may be a SymInt."""

    coefs: tuple[int, ...]
    const: Int = 0

    def _key(self) -> tuple[Any, ...]:
        # comparing SymInts would put a guard on them; their expressions compare freely
        return self.coefs, self.const.node.expr if isinstance(self.const, torch.SymInt) else self.const

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Linear) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    @property
    def is_constant(self) -> bool:
        return not any(self.coefs)

    def scaled(self, factor: int, plus: Int = 0) -> Linear:
        return Linear(tuple(factor * c for c in self.coefs), simplify(self.const * factor + plus))

    def opposite(self) -> Linear:
        """The atom that is >= 0 where this one isn't."""
        return self.scaled(-1, -1)

    def plus(self, other: Linear, factor: int = 1) -> Linear:
        coefs = tuple(a + factor * b for a, b in zip(self.coefs, other.coefs, strict=True))
        return Linear(coefs, simplify(self.const + factor * other.const))

    def substitute(self, index: Sequence[Linear | None], rank: int) -> Linear:
        """The value after each own index is replaced by ``index[d]``, linear in ``rank`` new ones (None: unused)."""
        out = Linear((0,) * rank, self.const)
        for coef, replacement in zip(self.coefs, index, strict=True):
            if coef:
                if replacement is None:
                    raise Unknown("an index of the mask isn't understood")
                out = out.plus(replacement, coef)
        return out

    def minimum(self, shape: Shape) -> Int:
        """The least value over all indices."""
        low = self.const
        for coef, size in zip(self.coefs, shape, strict=True):
            if coef < 0:
                low = low + coef * (size - 1)
        return simplify(low)

    def never_negative(self, shape: Shape) -> bool:
        return known(self.minimum(shape) >= 0)


class Unknown(Exception):
    """Raised where the domain can't express a result; the message is the reason."""


class Atom(Protocol):
    """A condition on indices: a `Linear` that isn't negative, or the truth of a tensor's elements."""

    @property
    def is_constant(self) -> bool: ...

    def opposite(self) -> Atom: ...

    def substitute(self, index: Sequence[Linear | None], rank: int) -> Atom: ...


@dataclass(frozen=True)
class Pred:
    """All the atoms hold, or the opposite of it."""

    atoms: tuple[Atom, ...] = ()
    negated: bool = False

    @staticmethod
    def of(atoms: Sequence[Atom], negated: bool = False) -> Pred:
        """Normal form: constant atoms decided, duplicates dropped, one negated atom turned round."""
        kept: list[Atom] = []
        for atom in atoms:
            if isinstance(atom, Linear) and atom.is_constant and isinstance(atom.const, int):
                if atom.const < 0:
                    return Pred((), not negated)
            elif atom not in kept:
                kept.append(atom)
        if negated and len(kept) == 1:
            return Pred((kept[0].opposite(),))
        return Pred(tuple(kept), negated)

    @property
    def is_true(self) -> bool:
        return not self.atoms and not self.negated

    @property
    def is_false(self) -> bool:
        return not self.atoms and self.negated

    def __invert__(self) -> Pred:
        return Pred.of(self.atoms, not self.negated)

    def __and__(self, other: Pred) -> Pred | None:
        """None if the conjunction has no such form."""
        if self.is_false or other.is_true or self == other:
            return self
        if other.is_false or self.is_true:
            return other
        if self.negated or other.negated:
            return None
        return Pred.of(self.atoms + other.atoms)

    def substitute(self, index: Sequence[Linear | None], rank: int) -> Pred:
        return Pred.of([a.substitute(index, rank) for a in self.atoms], self.negated)


TRUE = Pred()

Interval = tuple[float, float]


class Value:
    """What is known of a tensor's elements."""

    def substitute(self, index: Sequence[Linear | None], rank: int) -> Value:
        """The value of a tensor read at other indices: all slicing, broadcasting and permuting is this."""
        raise NotImplementedError


@dataclass(frozen=True)
class Affine(Value):
    """An integer, exactly ``linear``; ``absolute`` means its absolute value."""

    linear: Linear
    absolute: bool = False

    def substitute(self, index: Sequence[Linear | None], rank: int) -> Affine:
        return Affine(self.linear.substitute(index, rank), self.absolute)


@dataclass(frozen=True)
class TwoValued(Value):
    """Some number within ``yes`` where ``where`` holds, within ``no`` elsewhere.  Bools are 0 and 1."""

    where: Pred
    yes: Interval
    no: Interval

    def substitute(self, index: Sequence[Linear | None], rank: int) -> TwoValued:
        return TwoValued(self.where.substitute(index, rank), self.yes, self.no)


@dataclass(frozen=True)
class Top(Value):
    """Nothing is known, for this reason."""

    reason: str

    def substitute(self, index: Sequence[Linear | None], rank: int) -> Top:
        return self


def constant(x: float | int | bool) -> TwoValued:
    return TwoValued(TRUE, (x, x), (x, x))


def point(interval: Interval) -> float | None:
    return interval[0] if interval[0] == interval[1] else None


def constant_of(value: Value) -> float | None:
    """The number a value is everywhere, if it is one."""
    if isinstance(value, TwoValued):
        if value.where.is_true:
            return point(value.yes)
        if value.where.is_false:
            return point(value.no)
    if isinstance(value, Affine) and value.linear.is_constant and isinstance(value.linear.const, int):
        return abs(value.linear.const) if value.absolute else value.linear.const
    return None


def as_affine(value: Value, rank: int) -> Affine | None:
    """A value as an integer linear in its indices."""
    if isinstance(value, Affine):
        return value
    number = constant_of(value)
    if number is not None and math.isfinite(number) and number == int(number):
        return Affine(Linear((0,) * rank, int(number)))
    return None


def drop_unit_dims(value: Value, shape: Shape) -> Value:
    """Dims of static size 1 have only index 0, so no value depends on them."""
    rank = len(shape)
    index = [Linear((0,) * rank) if isinstance(s, int) and s == 1 else axis(d, rank) for d, s in enumerate(shape)]
    return value.substitute(index, rank)


def axis(dim: int, rank: int, step: int = 1, start: Int = 0) -> Linear:
    """``start + step * index_dim``."""
    return Linear(tuple(step if d == dim else 0 for d in range(rank)), simplify(start))


def broadcast(value: Value, shape: Shape, to: Shape) -> Value:
    """The value expanded to shape ``to``.  A dim it depends on must keep its size at every run of the graph."""
    rank, offset = len(to), len(to) - len(shape)
    index: list[Linear | None] = []
    for d, size in enumerate(shape):
        if offset + d < 0:
            index.append(None)
        elif isinstance(size, int) and size == 1:
            index.append(Linear((0,) * rank))
        else:
            index.append(axis(offset + d, rank) if same(size, to[offset + d]) else None)
    return value.substitute(index, rank)


def compare(op: str, a: Affine, b: Affine) -> TwoValued:
    """A comparison of two integers of the same rank."""
    if a.absolute or b.absolute:
        return _compare_absolute(op, a, b)
    d = a.linear.plus(b.linear, -1)
    if op in ("eq", "ne"):
        return TwoValued(Pred.of([d, d.scaled(-1)], op == "ne"), (1, 1), (0, 0))
    atom = {"ge": d, "gt": d.scaled(1, -1), "le": d.scaled(-1), "lt": d.scaled(-1, -1)}[op]
    return TwoValued(Pred.of([atom]), (1, 1), (0, 0))


def _compare_absolute(op: str, a: Affine, b: Affine) -> TwoValued:
    flipped = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt"}
    if op not in flipped or (a.absolute and b.absolute):
        raise Unknown("a comparison of absolute values in the mask isn't understood")
    if b.absolute:
        a, b, op = b, a, flipped[op]
    # |a| <= b  is  -b <= a <= b;  |a| < b is |a| <= b - 1;  > and >= are the opposites
    limit = b.linear if op in ("le", "gt") else b.linear.scaled(1, -1)
    return TwoValued(Pred.of([limit.plus(a.linear, -1), limit.plus(a.linear)], op in ("gt", "ge")), (1, 1), (0, 0))


def combine(fn: Callable[..., Interval], operands: Sequence[TwoValued]) -> TwoValued:
    """A pointwise function of two-valued operands of one shape, as a two-valued result again.

    Each operand's condition splits the indices; the result is told apart by the split that loses least, and its
    other side is the hull of all values there, so the answer is always an over-approximation.
    """
    preds: list[Pred] = []
    for operand in operands:
        if not (operand.where.is_true or operand.where.is_false or operand.where in preds):
            preds.append(operand.where)
    results: dict[tuple[bool, ...], Interval] = {}
    for signs in itertools.product((True, False), repeat=len(preds)):
        sign = dict(zip(preds, signs, strict=True))
        results[signs] = fn(*(o.yes if sign.get(o.where, o.where.is_true) else o.no for o in operands))
        if any(math.isnan(x) for x in results[signs]):
            raise Unknown("the mask may hold NaN")
    if not preds:
        only = next(iter(results.values()))
        return TwoValued(TRUE, only, only)
    best: tuple[float, TwoValued] | None = None
    for region, where in _splits(preds):
        inside = [v for signs, v in results.items() if region(signs)]
        outside = [v for signs, v in results.items() if not region(signs)]
        candidate = TwoValued(where, _hull(inside), _hull(outside))
        width = _width(candidate.yes) + _width(candidate.no)
        if best is None or width < best[0]:
            best = (width, candidate)
    if best is None:
        raise Unknown("the mask has no split")  # not reached: a single condition is always one
    result = best[1]
    if result.yes == result.no and point(result.yes) is not None:
        return TwoValued(TRUE, result.yes, result.yes)
    return result


def _splits(preds: list[Pred]) -> list[tuple[Callable[[tuple[bool, ...]], bool], Pred]]:
    out: list[tuple[Callable[[tuple[bool, ...]], bool], Pred]] = []
    for k, pred in enumerate(preds):
        out.append((lambda signs, k=k: signs[k], pred))  # type: ignore[misc]
    for chosen in itertools.product((True, False), repeat=len(preds)):
        where: Pred | None = TRUE
        for pred, sign in zip(preds, chosen, strict=True):
            where = None if where is None else where & (pred if sign else ~pred)
        if where is not None:
            out.append((lambda signs, chosen=chosen: signs == chosen, where))  # type: ignore[misc]
    return out


def _hull(intervals: list[Interval]) -> Interval:
    return min(i[0] for i in intervals), max(i[1] for i in intervals)


def _width(interval: Interval) -> float:
    # what masks ask of a number is whether it is 0, so a hull without 0 is nearly as good as a number
    if interval[0] == interval[1]:
        return 0.0
    return 1.0 if interval[1] < 0 or interval[0] > 0 else 2.0
