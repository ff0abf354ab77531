"""Operations on values that are read from the graph: sums of biases and masks, comparisons of segment ids."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import fx

from . import canonical, effects
from .canonical import Arg, Call
from .mask_domain import NEGLIGIBLE, Affine, Interval, TwoValued, Unknown, Value, combine, constant, constant_of
from .mask_ops import COMPARISON, dtype_of, rounded, shape_of, truth
from .mask_reads import Claim, Read, Sum, depends, is_loose, opaque

if TYPE_CHECKING:
    from .mask_interpreter import Interpreter

_POINTWISE = frozenset(
    "add sub rsub mul div floordiv mod pow sqrt rsqrt neg abs tanh clamp maximum minimum where masked_fill cast "  # noqa: SIM905
    "bitwise_and bitwise_or bitwise_xor bitwise_not logical_and logical_or logical_not".split()
) | set(COMPARISON)


def unknown_value(self: Interpreter, node: fx.Node) -> Value:
    """The value of a node that the exact handlers don't know: a sum, or else what its tensor will hold."""
    c = canonical.call(node)
    result = effects.result(node)
    handler = None if c is None else _HANDLERS.get(c.op)
    if c is not None and handler is not None:
        try:
            self.check_arguments(c)
            value = handler(self, c)
            loose = isinstance(value, Sum) and is_loose(value.rest)
            if not loose and not self.cuts_gradient(result, value):
                return value
        except (Unknown, KeyError, TypeError, ValueError, OverflowError):
            pass
    if c is None:
        return opaque(result, node)
    return opaque(result, node, small=_small(self, c), claim=_claim(self, c), varies=_varies(self, c))


def _varies(self: Interpreter, c: Call) -> set[int] | None:
    """The dims of a pointwise result along which an operand varies: elsewhere all its elements are equal."""
    if c.op not in _POINTWISE or c.inplace or "out" in c.args:
        return None
    shape, dims = shape_of(effects.result(c.node)), set[int]()
    try:
        for arg in c.args.values():
            if canonical.tensor(arg) is not None:
                dims |= depends(self.fitted(arg, shape))
    except Unknown:
        return None
    return dims


def _as_sum(self: Interpreter, arg: Arg, node: fx.Node) -> Sum:
    value = self.fitted(arg, shape_of(effects.result(node)))
    if isinstance(value, Sum):
        return value
    if not isinstance(value, TwoValued):
        number = constant_of(value)
        if number is None:
            raise Unknown("an index is added to scores")
        value = constant(number)
    return Sum((), value)


def _rest(node: fx.Node, fn: Callable[..., Interval], *operands: TwoValued) -> TwoValued:
    dtype = dtype_of(effects.result(node))
    return combine(lambda *x: rounded(fn(*x), dtype), operands)


def _add(self: Interpreter, c: Call) -> Value:
    if any(isinstance(self.value(c[name]), Read) for name in ("input", "other")):
        return _shifted(self, c)
    a, b = _as_sum(self, c["input"], c.node), _as_sum(self, c["other"], c.node)
    if not dtype_of(effects.result(c.node)).is_floating_point:
        raise Unknown("a sum of integers")
    return Sum((*a.terms, *b.terms), _rest(c.node, lambda x, y: (x[0] + y[0], x[1] + y[1]), a.rest, b.rest))


def _shifted(self: Interpreter, c: Call) -> Value:
    """An integer that is read plus or minus a constant."""
    shape = shape_of(effects.result(c.node))
    a, b = self.fitted(c["input"], shape), self.fitted(c["other"], shape)
    if c.op == "rsub":
        a, b = b, a
    if dtype_of(effects.result(c.node)) not in (torch.int64, torch.int32):
        raise Unknown("a narrow integer")
    sign = 1 if c.op == "add" else -1
    if isinstance(b, Read) and not isinstance(a, Read) and sign == 1:
        a, b = b, a
    number = constant_of(b)
    if not isinstance(a, Read) or number is None or number != int(number):
        raise Unknown("a sum of integers")
    return replace(a, plus=a.plus + sign * int(number))


def _scaled(self: Interpreter, c: Call) -> Value:
    a, b = c["input"], c["other"]
    factor = constant_of(self.value(b))
    if factor is None and c.op == "mul":
        a, b = b, a
        factor = constant_of(self.value(b))
    if factor is None or not (factor > 0 and math.isfinite(factor)):
        raise Unknown("a bias is multiplied by something that isn't a positive constant")
    factor = 1 / factor if c.op == "div" else factor
    total = _as_sum(self, a, c.node)
    if not dtype_of(effects.result(c.node)).is_floating_point:
        raise Unknown("a product of integers")
    scaled = tuple((read, old * factor) for read, old in total.terms)
    return Sum(scaled, _rest(c.node, lambda x: (x[0] * factor, x[1] * factor), total.rest))


def _hidden(total: Sum) -> bool:
    """Whether a value hides the pairs that it is added to, so that what else is added there doesn't matter."""
    sides = [(~total.rest.where, total.rest.no), (total.rest.where, total.rest.yes)]
    return not total.terms and all(where.is_false or interval[1] <= NEGLIGIBLE for where, interval in sides)


def _where(self: Interpreter, c: Call) -> Value:
    return _chosen(self, c, c["condition"], c["input"], c["other"])


def _masked_fill(self: Interpreter, c: Call) -> Value:
    return _chosen(self, c, c["mask"], c["value"], c["input"])


def _chosen(self: Interpreter, c: Call, condition: Arg, yes: Arg, no: Arg) -> Value:
    a, b = _as_sum(self, yes, c.node), _as_sum(self, no, c.node)
    if not (_hidden(a) or _hidden(b)):
        raise Unknown("one of two biases is chosen")
    where = self.two_valued(condition, shape_of(effects.result(c.node)))
    rest = _rest(c.node, lambda p, x, y: x if truth(p) else y, where, a.rest, b.rest)
    return Sum((*a.terms, *b.terms), rest)


def _cast(self: Interpreter, c: Call) -> Value:
    value = self.value(c["input"])
    before, after = canonical.tensor(c["input"]), canonical.tensor(c.node)
    if not isinstance(value, Sum) or before is None or after is None or before.device != after.device:
        raise Unknown("a cast")
    if torch.promote_types(before.dtype, after.dtype) is not after.dtype or not after.dtype.is_floating_point:
        raise Unknown("a cast that rounds a bias")
    return value


def _claim(self: Interpreter, c: Call | None) -> Claim | None:
    """What a comparison of two integers that are read says."""
    if c is None or c.op not in COMPARISON or dtype_of(effects.result(c.node)) is not torch.bool:
        return None
    try:
        shape = shape_of(effects.result(c.node))
        a, b = self.fitted(c["input"], shape), self.fitted(c["other"], shape)
    except (Unknown, KeyError):
        return None
    if not (isinstance(a, Read) and isinstance(b, Read)):
        return None
    difference = a.plus - b.plus
    a, b = replace(a, plus=0), replace(b, plus=0)
    if c.op in ("eq", "ne"):
        return Claim(c.op, a, b) if difference == 0 else None
    if c.op in ("ge", "gt"):
        return Claim("ge", a, b, (c.op == "gt") - difference)
    return Claim("ge", b, a, (c.op == "lt") + difference)


def _small(self: Interpreter, c: Call) -> bool:
    """Whether the integers that an operation gives surely fit 32 bits: counts, and quotients of indices."""
    if c.op == "cumsum":
        return _within(self, c.get("input"), 1)
    if c.op in ("floordiv", "div"):
        number = constant_of(self.value(c["other"])) if "other" in c.args else None
        return number is not None and number >= 1 and _within(self, c.get("input"), 1 << 16)
    if c.op in ("cast", "contiguous", "clone", "where", "masked_fill"):
        names = ("input", "other", "value")
        return all(_within(self, c.args[name], 1 << 16) for name in names if name in c.args)
    return False


def _within(self: Interpreter, arg: Arg, limit: int) -> bool:
    """Whether a value is an index, small, or at most ``limit``."""
    try:
        value = self.value(arg)
    except Unknown:
        return False
    if isinstance(value, TwoValued):
        return all(abs(x) <= limit for x in (*value.yes, *value.no))
    return limit > 1 and (isinstance(value, Affine) or (isinstance(value, Read) and value.small))


_HANDLERS: dict[str, Callable[[Interpreter, Call], Value]] = {
    "add": _add,
    "sub": _shifted,
    "rsub": _shifted,
    "mul": _scaled,
    "div": _scaled,
    "where": _where,
    "masked_fill": _masked_fill,
    "cast": _cast,
}
