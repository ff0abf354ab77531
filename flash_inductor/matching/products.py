"""Matrix products as index expressions: each dim of each operand and of the result has a label.

``q @ k.mT`` and ``einsum("bqhd,bkhd->bhqk", q, k)`` differ in nothing else than the order of the labels.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

from torch import fx

from . import canonical
from .canonical import Call
from .program import Refused, same_size

Label = str
Labels = tuple["Label | None", ...]  # None: a dim of size 1 that broadcasts

OPS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})


@dataclass(frozen=True)
class Operand:
    node: fx.Node
    labels: Labels

    def __contains__(self, label: Label) -> bool:
        return label in self.labels


@dataclass(frozen=True)
class Product:
    """``result[out] = sum over the labels that out lacks of left[...] * right[...]``."""

    node: fx.Node
    left: Operand
    right: Operand
    out: tuple[Label, ...]


def parse(c: Call) -> Product:
    """The product that a call computes (of ``baddbmm`` the product part only).  Raises Refused."""
    if c.op == "einsum":
        return _einsum(c)
    a, b = (c.get("batch1"), c.get("batch2")) if c.op == "baddbmm" else (c.get("input"), c.get("other"))
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        raise Refused(
            f"the operands of {c.node.name} are not tensors of this graph; compute them within the compiled function"
        )
    x, y, z = canonical.tensor(a), canonical.tensor(b), canonical.tensor(c.node)
    if x is None or y is None or z is None:
        raise Refused(f"the shapes of {c.node.name} and its operands are not known; compile with dynamic=False")
    if x.dim() < 2 or y.dim() < 2:
        raise Refused(
            f"{c.node.name} multiplies a matrix by a vector; "
            "give query, key and value at least two dims: length and head dim"
        )
    lead = tuple(f"l{i}" for i in range(z.dim() - 2))
    left = broadcast_labels(x.shape[:-2], z.shape[:-2], lead)
    right = broadcast_labels(y.shape[:-2], z.shape[:-2], lead)
    return Product(c.node, Operand(a, (*left, "m", "f")), Operand(b, (*right, "f", "n")), (*lead, "m", "n"))


def broadcast_labels(shape: tuple, to: tuple, labels: tuple[Label, ...]) -> Labels:
    """The labels of an operand's leading dims, aligned from the right."""
    labels, to = labels[len(labels) - len(shape) :], to[len(to) - len(shape) :]
    return tuple(
        None if same_size(n, 1) and not same_size(m, 1) else label
        for label, n, m in zip(labels, shape, to, strict=True)
    )


def _einsum(c: Call) -> Product:
    equation, operands = c.get("equation"), c.get("operands", ())
    if not isinstance(equation, str):
        raise Refused("an einsum without an equation string isn't understood; write it as a string")
    if len(operands) != 2 or not all(isinstance(x, fx.Node) for x in operands):
        raise Refused(f'the einsum "{equation}" does not have two operands; split it into two products')
    equation = equation.replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    tensors = [canonical.tensor(x) for x in operands]
    result = canonical.tensor(c.node)
    if len(terms) != 2 or result is None or any(t is None for t in tensors):
        raise Refused(f'the einsum "{equation}" isn\'t understood; write out its dims, with one ellipsis at most')
    ranks = [t.dim() for t in tensors if t is not None]
    hidden = max(rank - len(term) + 3 if "..." in term else 0 for term, rank in zip(terms, ranks, strict=True))
    spare = [ch for ch in string.ascii_letters if ch not in equation][:hidden]

    def expand(term: str, rank: int | None = None) -> str:
        if "..." not in term:
            return term
        n = hidden if rank is None else rank - len(term) + 3
        return term.replace("...", "".join(spare[hidden - n :]))

    lefts = [expand(term, t.dim()) for term, t in zip(terms, tensors, strict=True)]  # type: ignore[union-attr]
    if arrow:
        out = expand(output)
    else:
        letters = lefts[0] + lefts[1]
        out = "".join(spare) + "".join(sorted(ch for ch in set(letters) if letters.count(ch) == 1 and ch not in spare))
    if any(len(set(term)) != len(term) for term in (*lefts, out)):
        raise Refused(f'the einsum "{equation}" takes a diagonal; take it before the einsum')
    size = dict(zip(out, result.shape, strict=True))
    parsed = [
        Operand(
            node,
            tuple(
                None if ch in size and same_size(n, 1) and not same_size(size[ch], 1) else ch
                for ch, n in zip(term, tensor.shape, strict=True)  # type: ignore[union-attr]
            ),
        )
        for node, term, tensor in zip(operands, lefts, tensors, strict=True)
    ]
    return Product(c.node, parsed[0], parsed[1], tuple(out))


@dataclass(frozen=True)
class Scores:
    """The first product, with its roles: ``out`` is leading labels and query, key (``masks_ok`` if they are last)."""

    query: Operand
    key: Operand
    out: tuple[Label, ...]
    q: Label
    k: Label
    feature: Label

    @property
    def masks_ok(self) -> bool:
        return self.out[-2:] == (self.q, self.k)

    @property
    def lead(self) -> tuple[Label, ...]:
        return tuple(x for x in self.out if x not in (self.q, self.k))


def scores_of(product: Product) -> Scores:
    """The roles of the operands of the product before a softmax over the last dim."""
    key_label = product.out[-1]
    sides = [product.left, product.right]
    owners = [x for x in sides if key_label in x]
    if len(owners) != 1:
        raise Refused(
            "the softmax runs over a dim that both operands of the product have; nothing to do, that is no attention"
        )
    key = owners[0]
    query = sides[0] if key is sides[1] else sides[1]
    q_only = [x for x in product.out if x in query and x not in key]
    contracted = [x for x in query.labels if x is not None and x not in product.out]
    if (
        len(contracted) != 1
        or contracted[0] not in key
        or any(x is not None and x not in product.out and x not in contracted for x in key.labels)
    ):
        raise Refused(
            "the score product does not sum over exactly one dim of query and key; "
            "merge the feature dims into one head dim before the product"
        )
    if len(product.out) < 2 or not q_only:
        raise Refused("the score product has no query dim; give the query a length dim, which may be 1")
    if product.out[-2] in q_only:
        q = product.out[-2]
    elif len(q_only) == 1:
        q = q_only[0]
    else:
        raise Refused("the query dim of the scores can't be told from the group dims; put it next to the key dim")
    if any(x not in query and x not in key for x in product.out) or None in query.labels[-1:]:
        raise Refused("the score product isn't understood; use matmul, bmm or einsum of query and key")
    return Scores(query, key, product.out, q, key_label, contracted[0])


@dataclass(frozen=True)
class Values:
    """The second product: ``out`` in the order of the result, ``probabilities`` as the chain leaves them."""

    value: Operand
    out: tuple[Label, ...]
    q: Label
    k: Label
    feature: Label
    lead: tuple[Label, ...]


def values_of(product: Product, probabilities: fx.Node, names: tuple[Label, ...], q: Label, k: Label) -> Values:
    """The roles in the product after the softmax; ``names`` are the labels of the dims of the probabilities."""
    if product.left.node is product.right.node:
        raise Refused("the probabilities are multiplied by themselves; nothing to do: that is no attention")
    p, v = (product.left, product.right) if product.left.node is probabilities else (product.right, product.left)
    if len(p.labels) != len(names) or None in p.labels:
        raise Refused(
            "the value product broadcasts the probabilities over a dim that they don't have; "
            "expand query, key and value alike before the products"
        )
    rename = {old: new for old, new in zip(p.labels, names, strict=True) if old is not None}
    free = [x for x in v.labels if x is not None and x not in p]
    if len(free) != 1:
        raise Refused(
            "the value product does not have exactly one dim of its own, the value's head dim; "
            "merge the value's feature dims into one head dim before the product"
        )
    rename[free[0]] = feature = "v:" + free[0]
    out = tuple(rename[x] for x in product.out)
    value = Operand(v.node, tuple(None if x is None else rename[x] for x in v.labels))
    lead = tuple(x for x in names if x not in (q, k))
    if k in out:
        raise Refused("the value product does not sum over the keys; nothing to do, a transposed P is no attention")
    if k not in value or q in value or sorted(out) != sorted((*lead, q, feature)):
        raise Refused(
            "the value product does not sum over the keys alone; "
            "nothing to do: that is no attention; sum over other dims after the product"
        )
    return Values(value, out, q, k, feature, lead)
