"""Packed sequences: positions that start again mark the sequences, and within one they are indices up to a constant.

``segments = (diff(positions) != 1).cumsum(-1)`` (transformers) counts the places where the position does not go up by
one.  Between two places of one segment it always does, so there ``position(x) - position(y) == x - y``, and a
comparison of positions is a band of diagonals.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from . import canonical
from .mask_domain import Atom, Linear
from .mask_reads import Read, Truth
from .program import Program, constant, same_shape


def bands_within_segments(program: Program, atoms: Sequence[Atom]) -> list[Atom]:
    """The conditions of a conjunction, with comparisons of positions as comparisons of indices where that is proved."""
    pairs = [a.equal for a in atoms if isinstance(a, Truth) and a.equal is not None]
    return [next((x for pair in pairs if (x := _band(program, atom, pair))), atom) for atom in atoms]


def _band(program: Program, atom: Atom, segments: tuple[Read, Read]) -> Linear | None:
    claim = atom.claim if isinstance(atom, Truth) else None
    if claim is None or claim.op != "ge" or not isinstance(atom, Truth):
        return None
    a, b = claim.a, claim.b
    places = {segments[0].index, segments[1].index}
    same = a.node is b.node and a.since is b.since and segments[0].node is segments[1].node
    if not same or places != {a.index, b.index} or not a.index:
        return None
    if a.index[:-1] != b.index[:-1] or not _counts_breaks(program, segments[0], a):
        return None
    difference = a.index[-1].plus(b.index[-1], -1)
    at_least = Linear(difference.coefs, difference.const - claim.least)
    return at_least.opposite() if atom.negated else at_least


def _counts_breaks(program: Program, segments: Read, positions: Read) -> bool:
    """Whether ``segments`` is ``(diff(positions, prepend=one) != 1).cumsum(-1)``."""
    total = canonical.call(segments.since) if segments.since is segments.node else None
    if total is None or total.op != "cumsum" or not _last(total.get("dim"), segments.node):
        return False
    breaks = program.value(total["input"], total.node)
    if breaks is None or breaks.op != "ne" or constant(program, breaks.get("other"), breaks.node) != 1:
        return False
    steps = program.value(breaks["input"], breaks.node)
    if steps is None or steps.op != "diff" or steps.get("n", 1) != 1 or steps.get("append") is not None:
        return False
    source, result = canonical.tensor(positions.node), canonical.tensor(steps.node)
    if source is None or source.dtype not in (torch.int64, torch.int32) or not same_shape(source, result):
        return False
    if steps["input"] is not positions.node or not _last(steps.get("dim", -1), positions.node):
        return False
    start, end = program.position[positions.since], program.position[steps.node]
    return start <= end and not program.writes_between(positions.node, start, end)


def _last(dim: object, node: fx.Node) -> bool:
    tensor = canonical.tensor(node)
    return tensor is not None and dim in (-1, tensor.dim() - 1)
