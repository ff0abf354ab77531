"""Scores multiplied by a tensor: a learned temperature (Swin v2, QKNorm, XCiT), which is put on the query.

``(t * (q @ k.T))[i, j] == ((t * q) @ k.T)[i, j]`` for a ``t`` that is the same for all keys j.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from .canonical import tensor
from .operands import Part, Table, pairs
from .program import Refused
from .scoring import Factor

if TYPE_CHECKING:
    from .emit import Emitter
    from .plan import Plan

aten = torch.ops.aten


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
    part = Part.whole(factor.node, factor.at, place.table)
    if part.over_keys:
        raise Refused(f"`{factor.node.name}` scales each key's scores by another number; scale the key instead")
    return Temperature(part, factor.divided)


def applied(e: Emitter, plan: Plan, table: Table, given: Sequence[Temperature], query: fx.Node) -> fx.Node:
    """The query [batch, heads, queries, head dim] with the temperatures on it, in the dtype that torch promotes to."""
    for temperature in given:
        target = aten.div.Tensor if temperature.divided else aten.mul.Tensor
        query = e.call(target, query, pairs(e, plan, table, temperature.part))
    return query
