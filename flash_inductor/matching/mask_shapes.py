"""What slicing, indexing, permuting and reshaping mean for abstract values: each reads its input at other indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from . import canonical
from .canonical import Arg, Call
from .mask_domain import Int, Linear, Unknown, Value, as_affine, axis, broadcast, known, same, simplify
from .mask_ops import arg_shape_of, dtype_of, shape_of

if TYPE_CHECKING:
    from .mask_interpreter import Interpreter


def _expand(self: Interpreter, c: Call) -> Value:
    return self.fitted(c["input"], shape_of(c.node))


def _repeat_interleave(self: Interpreter, c: Call) -> Value:
    if canonical.number(c["repeats"]) is None:
        raise Unknown("the mask uses repeat_interleave with different counts")
    return _expand(self, c)


def _permuted(order: Callable[[Call, int], Sequence[int]]) -> Callable[[Interpreter, Call], Value]:
    def handler(self: Interpreter, c: Call) -> Value:
        rank = len(shape_of(c["input"]))
        source = [d % rank for d in order(c, rank)]
        index: list[Linear | None] = [None] * rank
        for new, old in enumerate(source):
            index[old] = axis(new, rank)
        return self.value(c["input"]).substitute(index, rank)

    return handler


def _transposed(c: Call, rank: int) -> Sequence[int]:
    order = list(range(rank))
    a, b = c["dim0"] % rank, c["dim1"] % rank
    order[a], order[b] = order[b], order[a]
    return order


def _moved(c: Call, rank: int) -> Sequence[int]:
    source, destination = c["source"], c["destination"]
    if not (isinstance(source, int) and isinstance(destination, int)):
        raise Unknown("the mask uses movedim with several dims")
    order = [d for d in range(rank) if d != source % rank]
    order.insert(destination % rank, source % rank)
    return order


def _reshape(self: Interpreter, c: Call) -> Value:
    """Row-major: leading and trailing dims that agree keep their index, dims of size 1 come and go."""
    if dtype_of(c.node) is not dtype_of(c["input"]):
        raise Unknown("the mask reinterprets its bits as another dtype")
    old, new = shape_of(c["input"]), shape_of(c.node)
    left = [(d, s) for d, s in enumerate(old) if not _is_one(s)]
    right = [(d, s) for d, s in enumerate(new) if not _is_one(s)]
    index: list[Linear | None] = [Linear((0,) * len(new)) if _is_one(s) else None for s in old]

    def match(end: int) -> None:
        while left and right and same(left[end][1], right[end][1]):
            index[left.pop(end)[0]] = axis(right.pop(end)[0], len(new))

    match(0)
    match(-1)
    return self.value(c["input"]).substitute(index, len(new))


def _is_one(size: Int) -> bool:
    return isinstance(size, int) and size == 1


def _getitem(self: Interpreter, c: Call) -> Value:
    if canonical.tensor(c["input"]) is None:
        raise Unknown("the mask is one of several results of an operation")
    index = c["index"]
    return _indexed(self, c, list(index) if isinstance(index, (tuple, list)) else [index])


def _aten_index(self: Interpreter, c: Call) -> Value:
    return _indexed(self, c, [slice(None) if i is None else i for i in c["indices"]])


def _along(item: Callable[[Call], Any]) -> Callable[[Interpreter, Call], Value]:
    """Operations that index one dim."""

    def handler(self: Interpreter, c: Call) -> Value:
        dim = c.get("dim", 0) % len(shape_of(c["input"]))
        return _indexed(self, c, [slice(None)] * dim + [item(c)])

    return handler


def _narrowed(c: Call) -> slice:
    return slice(c["start"], None)


def _indexed(self: Interpreter, c: Call, items: list[Any]) -> Value:
    shape, out = shape_of(c["input"]), shape_of(c.node)
    used = sum(1 for i in items if i is not None and i is not Ellipsis)
    spread = [slice(None)] * (len(shape) - used)
    at = next((k for k, i in enumerate(items) if i is Ellipsis), len(items))
    items = items[:at] + spread + items[at + 1 :]
    tensors = [k for k, i in enumerate(items) if canonical.tensor(i) is not None]
    # next to a tensor index, an integer is one too
    advanced = [k for k, i in enumerate(items) if k in tensors or (tensors and not _is_basic(i))]
    if advanced and advanced != list(range(advanced[0], advanced[-1] + 1)):
        raise Unknown("the mask is indexed by tensors in dims that aren't adjacent")
    block = max((len(arg_shape_of(items[k])) for k in advanced), default=0)
    index: list[Linear | None] = []
    position = 0  # the next dim of the result
    for k, item in enumerate(items):
        size = shape[len(index)] if item is not None else None
        if item is None:
            position += 1
        elif k in advanced:
            index.append(_tensor_index(self, item, size, range(position, position + block), out))
            position += block if k == advanced[-1] else 0
        elif isinstance(item, slice):
            index.append(_slice_index(self, item, size, position, len(out)))
            position += 1
        else:
            index.append(Linear((0,) * len(out), _offset(self, item, size)))
    return self.value(c["input"]).substitute(index, len(out))


def _is_basic(item: Any) -> bool:
    return item is None or isinstance(item, slice)


def _offset(self: Interpreter, item: Arg, size: Int) -> Int:
    """An integer index or slice start, counted from the front."""
    scalar = canonical.value(item)
    if isinstance(scalar, bool) or not isinstance(scalar, (int, torch.SymInt)):
        raise Unknown(f"the mask is indexed by `{item}`")
    scalar = simplify(scalar)
    if known(scalar >= 0):
        return scalar
    if known(scalar < 0) and known(scalar + size >= 0):
        return simplify(scalar + size)
    raise Unknown(f"the mask is indexed by `{item}`, which may be negative")


def _slice_index(self: Interpreter, item: slice, size: Int, position: int, rank: int) -> Linear:
    step = 1 if item.step is None else canonical.value(item.step)
    if isinstance(step, bool) or not isinstance(step, int):
        raise Unknown("the mask is sliced with a symbolic step")
    start = 0 if item.start is None else canonical.value(item.start)
    if isinstance(start, int) and not isinstance(start, bool) and start < 0 and isinstance(size, int):
        start = max(0, start + size)
    return axis(position, rank, step, _offset(self, start, size))


def _tensor_index(self: Interpreter, item: Arg, size: Int, dims: range, out: Sequence[Int]) -> Linear | None:
    """The index a tensor gives for one dim, or None where it isn't known (harmless if nothing depends on the dim)."""
    node = item if isinstance(item, fx.Node) and canonical.tensor(item) is not None else None
    if node is not None and dtype_of(node) in (torch.bool, torch.uint8):
        raise Unknown("the mask is indexed by a bool tensor")
    try:
        value = broadcast(self.value(item), arg_shape_of(item), [out[d] for d in dims])
    except Unknown:
        return None
    affine = as_affine(value, len(dims))
    if affine is None or affine.absolute:
        return None
    linear = affine.linear
    if linear.is_constant and isinstance(linear.const, int) and linear.const < 0:
        linear = linear.scaled(1, size)
    if not linear.never_negative([out[d] for d in dims]):
        return None
    coefs = [0] * len(out)
    for d, coef in zip(dims, linear.coefs, strict=True):
        coefs[d] = coef
    return Linear(tuple(coefs), linear.const)


SHAPE_HANDLERS: dict[str, Callable[[Interpreter, Call], Value]] = {
    **dict.fromkeys(("expand", "expand_as", "broadcast_to", "repeat", "contiguous", "clone", "detach"), _expand),
    **dict.fromkeys(("view", "view_as", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"), _reshape),
    "repeat_interleave": _repeat_interleave,
    "transpose": _permuted(_transposed),
    "permute": _permuted(lambda c, rank: c["dims"]),
    "t": _permuted(lambda c, rank: range(rank)[::-1]),
    "movedim": _permuted(_moved),
    "getitem": _getitem,
    "index": _aten_index,
    "select": _along(lambda c: c["index"]),
    "slice": _along(lambda c: slice(c.get("start"), None, c.get("step"))),
    "narrow": _along(_narrowed),
    "index_select": _along(lambda c: c["index"]),
}
