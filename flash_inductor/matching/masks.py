"""Proves what a mask means: visible exactly where ``lower <= j - i <= upper``, for every size the graph can have.

Nothing is matched by its spelling.  The mask's part of the graph is run on abstract values (mask_interpreter.py);
where they don't reach and sizes are static it is evaluated (closed.py); what neither proves is refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .._compat import buffers
from ..config import get_config
from ..spec import Int, MaskSpec
from . import canonical, closed, effects
from .canonical import Arg
from .mask_domain import NEGLIGIBLE, Linear, Pred, Top, TwoValued, Unknown, Value, broadcast, known, same, simplify
from .mask_interpreter import Interpreter
from .operands import NO_OPERANDS, Operands


class SeesNothing(Unknown):
    """The mask hides a row, or may, where that is not as if it were 0."""


REMEDY = "make the mask by comparing torch.arange's, or pass a finished bool or float mask to the compiled function"


@dataclass(frozen=True)
class Refusal:
    """Why a mask can't be used, as a sentence with a remedy: of its own, or what helps with any mask."""

    reason: str

    def __post_init__(self) -> None:
        if "; " not in self.reason:
            object.__setattr__(self, "reason", f"{self.reason}; {REMEDY}")


@dataclass(frozen=True)
class MaskProof:
    """What a mask was proved to mean.

    Attributes:
        mask: the band; a bound may be a SymInt expression of the graph's sizes.
        buffers: placeholders and get_attrs whose value was read; see `_compat.buffers.guard_unchanged`.
        ceiling: the largest number that hidden pairs get added.
        finite: the mask adds a finite number, so softmax over a row that sees nothing is not 0 but uniform.
        empty_rows: some row may see nothing (never set together with ``finite``: that is refused).
    """

    mask: MaskSpec
    buffers: tuple[fx.Node, ...] = ()
    ceiling: float = -math.inf
    finite: bool = False
    empty_rows: bool = False
    sizes: tuple[Int, Int] | None = None  # q_len, kv_len
    operands: Operands = NO_OPERANDS  # what hides pairs, or is added to scores, besides the band


def prove(
    mask: Arg, kind: str, q_len: Int, kv_len: Int, at: fx.Node, settled: dict[fx.Node, Value] | None = None
) -> MaskProof | Refusal:
    """What the mask means at node ``at``, or why that isn't known.

    Args:
        mask: a node (or number) broadcastable to ``[..., q_len, kv_len]``.
        kind: "keep" (bool, True is visible), "drop" (bool, True is masked) or "additive" (0 where visible, at most
            -1e4 elsewhere).
        q_len, kv_len: sizes of the scores' last two dims, ints or SymInts.
        at: the node that uses the mask; in-place writes before it count.
        settled: values that other proofs in this graph found, see Interpreter.
    """
    if kind not in ("keep", "drop", "additive"):
        raise ValueError(f"kind: expected 'keep', 'drop' or 'additive', got {kind!r}")
    q_len, kv_len = simplify(q_len), simplify(kv_len)
    used: list[fx.Node] = []

    def leaf(node: fx.Node) -> Value | None:
        real = readable(node)
        if real is None:
            return None
        used.append(node)
        return closed.recognise(real)

    with unset_fake_temporarily(), torch.no_grad():
        try:
            value: Value = Top("the mask isn't a tensor")
            if isinstance(mask, fx.Node):
                value = Interpreter(leaf, settled=settled).run(mask, at)
            tensor = canonical.tensor(mask)
            if tensor is None:
                raise Unknown("the mask isn't a tensor whose shape is known")
            shape = [simplify(s) for s in tensor.shape]
            answer = _from_value(value, kind, shape, tensor.dtype, q_len, kv_len)
            if isinstance(answer, Refusal):
                evaluated = closed.evaluate(mask, at, readable)
                if isinstance(evaluated, closed.Evaluated):
                    used = list(evaluated.buffers)
                    exact = closed.recognise(evaluated.tensor)
                    answer = _from_value(exact, kind, shape, tensor.dtype, q_len, kv_len)
        except Unknown as reason:
            answer = Refusal(str(reason))
    if isinstance(answer, MaskProof):
        return replace(answer, buffers=tuple(dict.fromkeys(used)))
    return answer


def readable(node: fx.Node) -> torch.Tensor | None:
    """The value of a buffer.  One that the graph itself writes to would compile again at every call."""
    real = buffers.buffer_value(node)
    if real is None or real.numel() > get_config().max_mask_elements:
        return None
    writes = (effects.written(user) for alias in effects.aliases(node) for user in alias.users)
    return None if any(effects.aliases(node) & set(w) for w in writes) else real


def conjoin(proofs: Sequence[MaskProof]) -> MaskProof | Refusal:
    """Several masks at one site: visible where all of them see."""
    if not proofs:
        return MaskProof(MaskSpec())
    sizes = next((p.sizes for p in proofs if p.sizes is not None), None)
    lowers = [p.mask.lower for p in proofs if p.mask.lower is not None]
    uppers = [p.mask.upper for p in proofs if p.mask.upper is not None]
    try:
        spec = MaskSpec(_tightest(lowers, 1), _tightest(uppers, -1))
        if sizes is None:
            raise Unknown("the sizes of the masks aren't known")
        finite = any(p.finite for p in proofs)
        proof = checked(spec, finite, *sizes)
    except Unknown as reason:
        return Refusal(str(reason))
    operands = functools.reduce(Operands.merged, [p.operands for p in proofs])
    buffers = tuple(dict.fromkeys(b for p in proofs for b in p.buffers))
    return replace(proof, ceiling=max(p.ceiling for p in proofs), buffers=buffers, operands=operands)


def _from_value(
    value: Value, kind: str, shape: Sequence[Int], dtype: torch.dtype, q_len: Int, kv_len: Int
) -> MaskProof | Refusal:
    try:
        if isinstance(value, Top):
            raise Unknown(value.reason)
        if not isinstance(value, TwoValued):
            raise Unknown("the mask is neither a bool nor two numbers")
        visible, ceiling = visible_where(value, kind, dtype)
        shape, visible = _to_scores(visible, shape, q_len, kv_len)
        proof = checked(band(visible, shape), ceiling != -math.inf, q_len, kv_len)
        return replace(proof, ceiling=ceiling)
    except Unknown as reason:
        return Refusal(str(reason))


def visible_where(value: TwoValued, kind: str, dtype: torch.dtype) -> tuple[Pred, float]:
    """Where the mask lets a score through, and the largest number that it adds elsewhere (-inf for a bool)."""
    if kind == "additive":
        if not dtype.is_floating_point:
            raise Unknown(f"the mask is added to the scores but is {dtype}")
    elif dtype is not torch.bool:
        raise Unknown(f"the mask is {dtype} where a bool is expected")
    sides = [(~value.where, value.no), (value.where, value.yes)]
    shown = []
    ceiling = -math.inf
    for where, interval in sides:
        if where.is_false:
            continue
        if kind != "additive":
            if interval not in ((0, 0), (1, 1)):
                raise Unknown("the mask's value isn't known everywhere")
            shows = interval[0] == (1 if kind == "keep" else 0)
        else:
            shows = interval == (0, 0)
            if not shows and not interval[1] <= NEGLIGIBLE:
                what = f"{interval[0]:g}" if interval[0] == interval[1] else f"{interval[0]:g} to {interval[1]:g}"
                raise Unknown(f"the mask adds {what} to scores; only 0 and numbers up to {NEGLIGIBLE:g} make a mask")
            ceiling = ceiling if shows else max(ceiling, interval[1])
        if shows:
            shown.append(where)
    if len(shown) == 2 or (shown and shown[0].is_true):
        return Pred(), -math.inf
    return (shown[0], ceiling) if shown else (~Pred(), ceiling)


def _to_scores(visible: Pred, shape: Sequence[Int], q_len: Int, kv_len: Int) -> tuple[Sequence[Int], Pred]:
    """The predicate over ``[..., q_len, kv_len]``."""
    lead = list(shape[:-2])
    full = [*lead, q_len, kv_len]
    for size, expected in zip(reversed(shape), (kv_len, q_len), strict=False):
        if not (isinstance(size, int) and size == 1) and not same(size, expected):
            raise Unknown(f"the mask has size {size} where the scores have {expected}")
    value = broadcast(TwoValued(visible, (1, 1), (0, 0)), shape, full)
    assert isinstance(value, TwoValued)
    return full, value.where


def band(visible: Pred, shape: Sequence[Int]) -> MaskSpec:
    """The band that a predicate over ``[..., q_len, kv_len]`` is.  Raises Unknown."""
    if visible.is_false:
        raise SeesNothing("the mask hides everything")
    if visible.negated:
        raise Unknown("the mask is a union of regions, not one band of diagonals")
    lowers: list[Int] = []
    uppers: list[Int] = []
    rows, columns = shape[-2:]
    for atom in visible.atoms:
        if not isinstance(atom, Linear):
            raise Unknown("the mask depends on a tensor's values")
        if atom.never_negative(shape):
            continue  # true at every index
        if any(atom.coefs[:-2]):
            raise Unknown("the mask differs between batch entries or heads")
        i, j = atom.coefs[-2:]
        # a dim of static size 1 has only index 0, where any coefficient is right
        if rows == 1 and isinstance(rows, int):
            i = -j
        elif columns == 1 and isinstance(columns, int):
            j = -i
        if i != -j or i == 0:
            raise Unknown("the mask isn't a band of diagonals: it depends on the position, not on key minus query only")
        if abs(i) > 1 and not isinstance(atom.const, int):
            raise Unknown("the mask has a slope that isn't one and a symbolic offset")
        bound = atom.const if abs(i) == 1 else atom.const // abs(i)
        if i > 0:
            uppers.append(simplify(bound))  # i - j + c >= 0
        else:
            lowers.append(simplify(-bound))  # j - i + c >= 0
    return MaskSpec(_tightest(lowers, 1), _tightest(uppers, -1))


def _tightest(bounds: Sequence[Int], sign: int) -> Int | None:
    """The largest (sign 1) or smallest (sign -1) bound, if that is known for every size."""
    best: Int | None = None
    for bound in bounds:
        if best is None or known(sign * (bound - best) >= 0):
            best = bound
        elif not known(sign * (bound - best) <= 0):
            raise Unknown(f"which of the mask's bounds {best} and {bound} is tighter depends on the sizes")
    return best


def checked(spec: MaskSpec, finite: bool, q_len: Int, kv_len: Int) -> MaskProof:
    """The proof of a band.  Raises Unknown if it is empty, or if a row that sees nothing would not be 0."""
    lower, upper = spec.lower, spec.upper
    # row i sees max(0, i + lower) .. min(kv_len - 1, i + upper); the worst rows are the first and the last
    rows_see = (
        (upper is None or known(upper >= 0))
        and (lower is None or known(q_len - 1 + lower <= kv_len - 1))
        and (lower is None or upper is None or known(upper - lower >= 0))
    )
    if lower is not None and upper is not None and not known(upper - lower >= 0):
        raise SeesNothing(
            "the mask's band is empty, or may be: its lower bound isn't known to be below its upper bound"
        )
    nothing = (upper is not None and known(q_len - 1 + upper < 0)) or (lower is not None and known(lower > kv_len - 1))
    if nothing:
        raise SeesNothing("the mask hides everything")
    if finite and not rows_see:
        raise SeesNothing(
            "a row of the mask may hide every key, and a finite number is added there, so that softmax averages over "
            "all keys; use -inf or a bool mask, or keep the diagonal visible"
        )
    return MaskProof(spec, finite=finite, empty_rows=not rows_see, sizes=(q_len, kv_len))
