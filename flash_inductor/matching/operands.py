"""The tensors of a site besides query, key and value: bias, mask, segments, sinks, dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx

from .canonical import tensor
from .mask_domain import Linear, axis
from .program import Refused, same_size

if TYPE_CHECKING:
    from .plan import Plan
    from .products import Label


@dataclass(frozen=True)
class Part:
    """A tensor of the graph, read at every pair of a table [..., queries, keys].

    Attributes:
        node: the tensor as it is from the time that ``since`` has run.
        index: which element of each of its dims is read, linear in the indices of the table: an index of the table,
            from some number on, or a number.
        table: the sizes of the table.
        negated: (bool) the opposite is meant.
        factor: (floating) what the numbers are multiplied by.
    """

    node: fx.Node
    since: fx.Node
    index: tuple[Linear, ...]
    table: tuple[Any, ...]
    negated: bool = False
    factor: float = 1.0

    @staticmethod
    def whole(node: fx.Node, since: fx.Node, table: Sequence[Any]) -> Part:
        """A tensor as it broadcasts to the table.  Raises Refused if it doesn't."""
        value = tensor(node)
        if value is None:
            raise Refused("the mask is not a tensor; pass a bool or float tensor, or None")
        rank, offset = len(table), len(table) - value.dim()
        if offset < 0:
            raise Refused("the mask has more dims than the scores; give it as many, each 1 or that size")
        index = []
        for d, size in enumerate(value.shape):
            if isinstance(size, int) and size == 1:
                index.append(Linear((0,) * rank))
            elif same_size(size, table[offset + d]):
                index.append(axis(offset + d, rank))
            else:
                wanted = table[offset + d]
                raise Refused(f"the mask has size {size} where the scores have {wanted}; give it that size or 1")
        return Part(node, since, tuple(index), tuple(table))

    @property
    def dims(self) -> list[int]:
        """The dims of the table that its value may depend on."""
        return sorted({d for linear in self.index for d, coef in enumerate(linear.coefs) if coef})

    @property
    def over_queries(self) -> bool:
        return len(self.table) - 2 in self.dims

    @property
    def over_keys(self) -> bool:
        return len(self.table) - 1 in self.dims

    def obstacle(self) -> str | None:
        """Why it can't be had as a view of the tensor."""
        used: list[int] = []
        for linear in self.index:
            dims = [d for d, coef in enumerate(linear.coefs) if coef]
            if len(dims) > 1 or any(linear.coefs[d] != 1 for d in dims) or not isinstance(linear.const, int):
                return (
                    f"`{self.node.name}` is read at indices that aren't a slice of it; slice or copy it before its use"
                )
            used += dims
        if len(used) != len(set(used)):
            return f"`{self.node.name}` is read along its diagonal; copy it before its use"
        return None


@dataclass(frozen=True)
class Operands:
    """What a site has besides query, key and value.

    Several masks hide what any of them hides; several biases are added up.  ``sinks`` [query heads] is a node in the
    order of the op's heads.
    """

    bias: tuple[Part, ...] = ()
    mask: tuple[Part, ...] = ()
    query_segments: Part | None = None
    key_segments: Part | None = None
    sinks: fx.Node | None = None
    dropout_p: float = 0.0

    def __bool__(self) -> bool:
        return self != NO_OPERANDS

    def merged(self, other: Operands) -> Operands:
        """Both at once.  Raises Refused where there can be only one."""
        for name in ("query_segments", "sinks"):
            if getattr(self, name) is not None and getattr(other, name) is not None:
                raise Refused(f"the site has two {name.replace('_', ' ')}; the op takes one, so merge them")
        if self.dropout_p and other.dropout_p:
            raise Refused("the probabilities are dropped out twice; leave one of the dropouts out")
        return Operands(
            (*self.bias, *other.bias),
            (*self.mask, *other.mask),
            self.query_segments or other.query_segments,
            self.key_segments or other.key_segments,
            self.sinks or other.sinks,
            self.dropout_p or other.dropout_p,
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        given = (*self.bias, *self.mask, self.query_segments, self.key_segments)
        return tuple(part for part in given if part is not None)

    def words(self) -> tuple[str, ...]:
        """For reports, as `AttentionSpec.extras`."""
        found = []
        if any(not p.over_queries for p in self.mask):
            found.append("padding")
        if any(p.over_queries for p in self.mask):
            found.append("mask")
        if self.query_segments is not None:
            found.append("segments")
        if self.bias:
            found.append("bias")
        if self.sinks is not None:
            found.append("sinks")
        if self.dropout_p:
            found.append(f"dropout {self.dropout_p:g}")
        return tuple(found)


NO_OPERANDS = Operands()


@dataclass(frozen=True)
class Table:
    """The scores' dims at the score product: leading labels, query, key; and their sizes."""

    labels: tuple[Label, ...]
    sizes: tuple[Any, ...]

    def place(self, plan: Plan, at: fx.Node, sizes: Sequence[Any]) -> Place:
        """Where a mask comes in, at ``at``, whose scores have these sizes (others than ours after a reshape)."""
        ours = self.sizes[:-2]
        same = len(sizes) == len(self.sizes) and all(same_size(a, b) for a, b in zip(sizes, ours, strict=False))
        batch, lead = plan.query.batch, self.labels[:-2]
        if same:
            return Place(at, tuple(sizes), tuple(x in batch for x in lead))
        return Place(at, tuple(sizes), (not plan.query.heads,) * (len(sizes) - 2))


@dataclass(frozen=True)
class Place:
    """Where a mask comes in.

    Attributes:
        at: the node that uses the mask.
        table: the sizes of the scores there, [..., queries, keys].
        batch: whether each leading dim of the table is a part of the op's batch, not of its heads.
        fill: the score of the pairs that a bool mask hides.
        factor: what the scores are multiplied by after the mask.
    """

    at: fx.Node
    table: tuple[Any, ...]
    batch: tuple[bool, ...]
    fill: float = -math.inf
    factor: float = 1.0


def check_kept(program: Any, parts: Sequence[Part]) -> None:
    """Raise Refused if a part is written to after it was read: the op reads it later, and keeps it for its backward."""
    for part in parts:
        writes = program.writes_between(part.node, program.position[part.since], len(program.nodes))
        if writes:
            writer = writes[0][0].name
            raise Refused(f"the mask `{part.node.name}` is written to in place by `{writer}`; write to a clone of it")
