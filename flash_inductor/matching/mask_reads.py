"""Abstract values for what a mask takes from tensors of the graph whose values aren't known: where they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from . import canonical
from .mask_domain import NEGLIGIBLE, Affine, Linear, Pred, TwoValued, Unknown, Value, axis, simplify


@dataclass(frozen=True)
class Read(Value):
    """What ``node`` holds at ``index``, from the time that ``since`` has run, plus a number.

    ``small``: an integer that surely fits 32 bits.
    """

    node: fx.Node
    since: fx.Node
    index: tuple[Linear, ...]
    plus: int = 0
    small: bool = False

    @staticmethod
    def of(node: fx.Node, since: fx.Node) -> Read:
        tensor = canonical.tensor(node)
        if tensor is None:
            raise Unknown(f"`{node.name}` isn't a tensor whose shape is known")
        sizes = [simplify(s) for s in tensor.shape]
        rank = len(sizes)
        one = Linear((0,) * rank)
        return Read(
            node, since, tuple(one if isinstance(s, int) and s == 1 else axis(d, rank) for d, s in enumerate(sizes))
        )

    def substitute(self, index: Sequence[Linear | None], rank: int) -> Read:
        return replace(self, index=tuple(x.substitute(index, rank) for x in self.index))

    @property
    def dims(self) -> set[int]:
        """The dims that the element read depends on."""
        return _dims(self.index)


@dataclass(frozen=True)
class Claim:
    """What the truth of a comparison says of two integers: ``a == b``, ``a != b``, or ``a - b >= least``."""

    op: str  # "eq", "ne", "ge"
    a: Read
    b: Read
    least: int = 0

    def substitute(self, index: Sequence[Linear | None], rank: int) -> Claim:
        return replace(self, a=self.a.substitute(index, rank), b=self.b.substitute(index, rank))


@dataclass(frozen=True)
class Truth:
    """A condition: the element of a bool tensor is True, or is False."""

    read: Read
    negated: bool = False
    claim: Claim | None = None

    @property
    def is_constant(self) -> bool:
        return False

    def opposite(self) -> Truth:
        return replace(self, negated=not self.negated)

    def substitute(self, index: Sequence[Linear | None], rank: int) -> Truth:
        claim = None if self.claim is None else self.claim.substitute(index, rank)
        return replace(self, read=self.read.substitute(index, rank), claim=claim)

    @property
    def equal(self) -> tuple[Read, Read] | None:
        """The two integers that are equal where it holds, and only there."""
        if self.claim is None or self.claim.op != ("ne" if self.negated else "eq"):
            return None
        return self.claim.a, self.claim.b


@dataclass(frozen=True)
class Sum(Value):
    """A sum of what floating tensors hold, each times a positive factor, and of a two-valued number."""

    terms: tuple[tuple[Read, float], ...]
    rest: TwoValued

    def substitute(self, index: Sequence[Linear | None], rank: int) -> Sum:
        terms = tuple((read.substitute(index, rank), factor) for read, factor in self.terms)
        return Sum(terms, self.rest.substitute(index, rank))

    def needs_grad(self) -> bool:
        tensors = [canonical.tensor(read.node) for read, _ in self.terms]
        return any(t is not None and t.requires_grad for t in tensors)


def depends(value: Value) -> set[int]:
    """The dims along which a value may vary."""
    if isinstance(value, Read):
        return value.dims
    if isinstance(value, Affine):
        return _dims([value.linear])
    if isinstance(value, Sum):
        return depends(value.rest).union(*(read.dims for read, _ in value.terms))
    if isinstance(value, TwoValued) and all(_exact(value)):
        atoms = value.where.atoms
        return _dims([a for a in atoms if isinstance(a, Linear)]).union(
            *(a.read.dims for a in atoms if isinstance(a, Truth))
        )
    raise Unknown("a value varies in a way that isn't known")


def _exact(value: TwoValued) -> list[bool]:
    """Whether it is known which number each side holds."""
    sides = [(~value.where, value.no), (value.where, value.yes)]
    return [low == high for where, (low, high) in sides if not where.is_false]


def is_loose(value: Value) -> bool:
    """Whether so little is known of two numbers that it is better to read the tensor: one of them may be 0 or not."""
    if not isinstance(value, TwoValued) or all(_exact(value)):
        return False
    sides = [(~value.where, value.no), (value.where, value.yes)]
    return any(low != high and high > NEGLIGIBLE for where, (low, high) in sides if not where.is_false)


def _dims(linears: Sequence[Linear]) -> set[int]:
    return {d for linear in linears for d, coef in enumerate(linear.coefs) if coef}


def opaque(
    node: fx.Node,
    since: fx.Node,
    *,
    small: bool = False,
    claim: Claim | None = None,
    varies: set[int] | None = None,
) -> Value:
    """The value of a tensor of which nothing is known but that it can be read.

    ``varies``: the dims along which its elements may differ, so that one index will do for the others.
    """
    read, tensor = Read.of(node, since), canonical.tensor(node)
    if varies is not None:
        one = Linear((0,) * len(read.index))
        read = replace(read, index=tuple(x if d in varies else one for d, x in enumerate(read.index)))
    assert tensor is not None  # Read.of checked it
    if str(tensor.dtype) == "torch.bool":
        return TwoValued(Pred((Truth(read, claim=claim),)), (1, 1), (0, 0))
    if tensor.dtype.is_floating_point:
        return Sum(((read, 1.0),), TwoValued(Pred(), (0, 0), (0, 0)))
    narrow = not tensor.dtype.is_complex and tensor.dtype.itemsize <= 4 and "uint32" not in str(tensor.dtype)
    return replace(read, small=small or narrow)
