"""What each operation on values (arithmetic, comparisons, creation) means for abstract values of masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx

from . import canonical, effects
from .canonical import Arg, Call
from .mask_domain import (
    Affine,
    Interval,
    Linear,
    Pred,
    Shape,
    TwoValued,
    Unknown,
    Value,
    as_affine,
    axis,
    broadcast,
    combine,
    compare,
    constant_of,
    drop_unit_dims,
    point,
    same,
    simplify,
)

if TYPE_CHECKING:
    from .mask_interpreter import Interpreter

# an integer index is exact in these; narrower types round or wrap around within the sizes masks have
EXACT_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)


def shape_of(node: Arg) -> Shape:
    tensor = canonical.tensor(node)
    assert tensor is not None  # callers look at tensors only
    return [simplify(s) for s in tensor.shape]


def arg_shape_of(arg: Arg) -> Shape:
    return shape_of(arg) if canonical.tensor(arg) is not None else []


def dtype_of(node: fx.Node) -> torch.dtype:
    tensor = canonical.tensor(node)
    assert tensor is not None
    return tensor.dtype


def rounded(interval: Interval, dtype: torch.dtype) -> Interval:
    """The interval after its numbers are stored as ``dtype``."""

    def store(x: float) -> float:
        if dtype is torch.bool:
            return int(x != 0)
        try:
            return torch.tensor(x, dtype=dtype).item()
        except (RuntimeError, OverflowError, ValueError) as error:
            raise Unknown(f"the mask holds {x}, which doesn't fit {dtype}") from error

    if dtype is torch.bool and interval[0] < 0 < interval[1]:
        return (0, 1)
    low, high = store(interval[0]), store(interval[1])
    return (min(low, high), max(low, high))


def _pointwise(self: Interpreter, node: fx.Node, fn: Callable[..., Interval], args: Sequence[Arg]) -> TwoValued:
    result = effects.result(node)
    shape, dtype = shape_of(result), dtype_of(result)
    return combine(lambda *x: rounded(fn(*x), dtype), [self.two_valued(a, shape) for a in args])


def _corners(fn: Callable[[float, float], float]) -> Callable[[Interval, Interval], Interval]:
    """Interval form of a function that is monotone in each argument."""

    def apply(a: Interval, b: Interval) -> Interval:
        results = [fn(x, y) for x in a for y in b]
        if any(math.isnan(r) for r in results):
            raise Unknown("the mask may hold NaN")
        return min(results), max(results)

    return apply


def _decided(fn: Callable[[float, float], bool]) -> Callable[[Interval, Interval], Interval]:
    """Interval form of a comparison, where it has one answer."""

    def apply(a: Interval, b: Interval) -> Interval:
        answers = {bool(fn(x, y)) for x in a for y in b}
        apart = a[1] < b[0] or b[1] < a[0]
        points = a[0] == a[1] and b[0] == b[1]
        if len(answers) > 1 or not (apart or points):
            raise Unknown("the mask compares values that aren't known exactly")
        return (int(answers.pop()),) * 2

    return apply


def truth(a: Interval) -> bool:
    if a[0] <= 0 <= a[1] and a[0] != a[1]:
        raise Unknown("the mask uses values that aren't known exactly as a condition")
    return a[0] != 0


def _div(x: float, y: float) -> float:
    if y == 0:
        raise Unknown("the mask divides by zero")
    return x / y


_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "rsub": lambda x, y: y - x,
    "mul": lambda x, y: x * y,
    "maximum": max,
    "minimum": min,
}
COMPARISON: dict[str, Callable[[float, float], bool]] = {
    "le": lambda x, y: x <= y,
    "lt": lambda x, y: x < y,
    "ge": lambda x, y: x >= y,
    "gt": lambda x, y: x > y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
}
_LOGIC: dict[str, Callable[[bool, bool], bool]] = {
    "and": lambda x, y: x and y,
    "or": lambda x, y: x or y,
    "xor": lambda x, y: x != y,
}


def _arithmetic(self: Interpreter, c: Call) -> Value:
    a, b = c["input"], c["other"]
    if c.op == "rsub":
        a, b = b, a
    rank = len(shape_of(effects.result(c.node)))
    x, y = (as_affine(self.fitted(v, shape_of(effects.result(c.node))), rank) for v in (a, b))
    exact = dtype_of(effects.result(c.node)) in EXACT_DTYPES and x is not None and y is not None
    if exact and x is not None and y is not None and not (x.absolute or y.absolute):
        if c.op == "add":
            return Affine(x.linear.plus(y.linear))
        if c.op in ("sub", "rsub"):
            return Affine(x.linear.plus(y.linear, -1))
        if c.op == "mul":
            for one, other in ((x, y), (y, x)):
                if one.linear.is_constant and isinstance(one.linear.const, int):
                    return Affine(other.linear.scaled(one.linear.const))
    fn = _ARITHMETIC["sub" if c.op == "rsub" else c.op]
    return _pointwise(self, c.node, _corners(fn), [a, b])


def _divide(self: Interpreter, c: Call) -> Value:
    return _pointwise(self, c.node, _corners(_div), [c["input"], c["other"]])


def _neg(self: Interpreter, c: Call) -> Value:
    x = self.value(c["input"])
    if isinstance(x, Affine) and not x.absolute:
        return Affine(x.linear.scaled(-1))
    return _pointwise(self, c.node, lambda a: (-a[1], -a[0]), [c["input"]])


def _abs(self: Interpreter, c: Call) -> Value:
    x = self.value(c["input"])
    if isinstance(x, Affine):
        return Affine(x.linear, absolute=True)
    return _pointwise(self, c.node, lambda a: (abs(_exact(a)),) * 2, [c["input"]])


def _exact(a: Interval) -> float:
    x = point(a)
    if x is None:
        raise Unknown("the mask uses values that aren't known exactly")
    return x


def _comparison(self: Interpreter, c: Call) -> Value:
    shape = shape_of(effects.result(c.node))
    a, b = self.fitted(c["input"], shape), self.fitted(c["other"], shape)
    if isinstance(a, Affine) or isinstance(b, Affine):
        x, y = as_affine(a, len(shape)), as_affine(b, len(shape))
        if x is None or y is None:
            raise Unknown("the mask compares indices with something that isn't an index")
        return compare(c.op, x, y)
    return _pointwise(self, c.node, _decided(COMPARISON[c.op]), [c["input"], c["other"]])


def _logic(self: Interpreter, c: Call) -> Value:
    kind, _, name = c.op.partition("_")
    operands = [c["input"], c["other"]]
    if kind == "bitwise":
        for arg in operands:
            t = canonical.tensor(arg)
            if not (t.dtype is torch.bool if t is not None else isinstance(canonical.value(arg), bool)):
                raise Unknown(f"the mask uses {c.op} on integers")
    fn = _LOGIC[name]
    return _pointwise(self, c.node, lambda a, b: (int(fn(truth(a), truth(b))),) * 2, operands)


def _not(self: Interpreter, c: Call) -> Value:
    if c.op == "bitwise_not" and dtype_of(effects.result(c.node)) is not torch.bool:
        raise Unknown("the mask uses bitwise_not on integers")
    return _pointwise(self, c.node, lambda a: (int(not truth(a)),) * 2, [c["input"]])


def _where(self: Interpreter, c: Call) -> Value:
    if "input" not in c.args or "other" not in c.args:
        raise Unknown("the mask uses `where` with one argument")
    return _pointwise(self, c.node, lambda p, a, b: a if truth(p) else b, [c["condition"], c["input"], c["other"]])


def _masked_fill(self: Interpreter, c: Call) -> Value:
    return _pointwise(self, c.node, lambda a, p, v: v if truth(p) else a, [c["input"], c["mask"], c["value"]])


def _triangle(self: Interpreter, c: Call) -> Value:
    shape = shape_of(effects.result(c.node))
    rank = len(shape)
    diagonal = self.value(c.get("diagonal", 0))
    offset = as_affine(diagonal, 0)
    if offset is None or rank < 2:
        raise Unknown(f"`{c.op}` in the mask has a diagonal that isn't a known integer")
    # tril keeps j - i <= diagonal, triu keeps j - i >= diagonal
    distance = axis(rank - 2, rank).plus(axis(rank - 1, rank), -1)
    keep = Linear(distance.coefs, simplify(offset.linear.const))
    if c.op == "triu":
        keep = keep.scaled(-1)
    kept = drop_unit_dims(TwoValued(Pred.of([keep]), (1, 1), (0, 0)), shape)
    assert isinstance(kept, TwoValued)
    return combine(lambda p, x: x if truth(p) else (0, 0), [kept, self.two_valued(c["input"], shape)])


def _cast(self: Interpreter, c: Call) -> Value:
    value = self.value(c["input"])
    if isinstance(value, Affine):
        if dtype_of(effects.result(c.node)) is torch.bool:
            raise Unknown("the mask turns an index into a bool")
        return value
    dtype = dtype_of(effects.result(c.node))
    integer = not (dtype.is_floating_point or dtype is torch.bool)
    return combine(
        lambda a: rounded((math.trunc(_exact(a)),) * 2 if integer else a, dtype),
        [self.two_valued(c["input"], shape_of(effects.result(c.node)))],
    )


def _arange(self: Interpreter, c: Call) -> Value:
    bounds = list(c.get("bounds", ()))
    start, step = c.get("start", 0), c.get("step", 1)
    if len(bounds) >= 2:
        start = bounds[0]
    if len(bounds) >= 3:
        step = bounds[2]
    first, stride = as_affine(self.value(start), 0), canonical.number(step)
    if first is None or stride is None or stride != int(stride):
        raise Unknown("the mask uses arange with a start or step that isn't a known integer")
    return Affine(axis(0, 1, int(stride), first.linear.const))


def _filled(fill: Callable[[Call], Arg]) -> Callable[[Interpreter, Call], Value]:
    def handler(self: Interpreter, c: Call) -> Value:
        arg = fill(c)
        if isinstance(arg, (list, tuple)):
            raise Unknown("the mask is written out as a list of numbers")
        shape = shape_of(effects.result(c.node))
        value = broadcast(self.value(arg), arg_shape_of(arg), shape)
        if isinstance(value, Affine):
            return value
        return _pointwise(self, c.node, lambda a: a, [arg])

    return handler


def _setitem(self: Interpreter, c: Call) -> Value:
    index = c["index"] if isinstance(c["index"], tuple) else (c["index"],)
    if not all(i is Ellipsis or i == slice(None) for i in index):
        raise Unknown("a part of the mask is assigned to")
    return _filled(lambda c: c["value"])(self, c)


def _eye(self: Interpreter, c: Call) -> Value:
    distance = axis(1, 2).plus(axis(0, 2), -1)
    return TwoValued(Pred.of([distance, distance.scaled(-1)]), (1, 1), (0, 0))


def _empty(self: Interpreter, c: Call) -> Value:
    raise Unknown("the mask reads memory that was never written")


def _diff(self: Interpreter, c: Call) -> Value:
    x = as_affine(self.value(c["input"]), len(shape_of(c["input"])))
    if x is None or x.absolute or c.get("n", 1) != 1 or c.get("append") is not None:
        raise Unknown("the mask uses diff on values that aren't indices")
    rank = len(x.linear.coefs)
    dim = c.get("dim", -1) % rank
    step = x.linear.coefs[dim]
    prepend = c.get("prepend")
    if prepend is not None:
        shape = shape_of(prepend)
        first = as_affine(self.value(prepend), rank)
        if first is None or first.absolute or len(shape) != rank or not same(shape[dim], 1):
            raise Unknown("the mask uses diff with a prepend that isn't understood")
        at_zero = Linear(tuple(0 if d == dim else v for d, v in enumerate(x.linear.coefs)), x.linear.const)
        jump = at_zero.plus(first.linear, -1)
        if not (jump.is_constant and same(jump.const, step)):
            raise Unknown("the mask uses diff with a prepend that doesn't continue the sequence")
    return Affine(Linear((0,) * rank, step))


def _cumsum(self: Interpreter, c: Call) -> Value:
    number = constant_of(self.value(c["input"]))
    rank = len(shape_of(effects.result(c.node)))
    if number is None or number != int(number) or rank == 0:
        raise Unknown("the mask uses cumsum of values that aren't one known integer")
    return Affine(axis(c["dim"] % rank, rank, int(number), int(number)))


VALUE_HANDLERS: dict[str, Callable[[Interpreter, Call], Value]] = {
    **dict.fromkeys(_ARITHMETIC, _arithmetic),
    **dict.fromkeys(COMPARISON, _comparison),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or"), _logic),
    **dict.fromkeys(("bitwise_not", "logical_not"), _not),
    **dict.fromkeys(("tril", "triu"), _triangle),
    **dict.fromkeys(("full", "new_full", "full_like"), _filled(lambda c: c["fill_value"])),
    **dict.fromkeys(("ones", "new_ones", "ones_like"), _filled(lambda c: 1)),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like", "zero"), _filled(lambda c: 0)),
    **dict.fromkeys(("tensor", "scalar_tensor", "new_tensor"), _filled(lambda c: c["data"])),
    **dict.fromkeys(("empty", "new_empty", "empty_like"), _empty),
    "fill": _filled(lambda c: c["value"]),
    "setitem": _setitem,
    "copy": _filled(lambda c: c["src"]),
    "div": _divide,
    "neg": _neg,
    "abs": _abs,
    "where": _where,
    "masked_fill": _masked_fill,
    "cast": _cast,
    "arange": _arange,
    "eye": _eye,
    "diff": _diff,
    "cumsum": _cumsum,
}
