"""Scores multiplied by a tensor: a learned temperature (Swin v2, QKNorm, XCiT), which is put on the query.

``(t * (q @ k.T))[i, j] == ((t * q) @ k.T)[i, j]`` for a ``t`` that is the same for all keys j.
"""

from __future__ import annotations

from dataclasses import dataclass

from .canonical import tensor
from .operands import Part, Table
from .plan import Plan
from .scoring import Factor


@dataclass(frozen=True)
class Temperature:
    """What the scores are multiplied, or divided, by at every pair; the same for all keys."""

    part: Part
    divided: bool


def of(factor: Factor, plan: Plan, table: Table) -> Temperature:
    """What a step of the scores says, in the dims of the score product.  Raises Refused."""
    scores = tensor(factor.at)
    assert scores is not None  # the walk came through it
    place = table.place(plan, factor.at, scores.shape)
    return Temperature(Part.whole(factor.node, factor.at, place.table), factor.divided)
