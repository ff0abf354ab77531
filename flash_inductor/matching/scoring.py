"""The steps between the score product and the softmax, and what they amount to."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import fx

from .masks import NEGLIGIBLE
from .program import Refused


@dataclass(frozen=True)
class Scale:
    factor: float


@dataclass(frozen=True)
class Factor:
    """The scores are multiplied, or divided, by ``node``, which is the same for all keys: a learned temperature."""

    node: fx.Node
    at: fx.Node
    divided: bool


@dataclass(frozen=True)
class Tanh:
    pass


@dataclass(frozen=True)
class Shift:
    """A number for each row is subtracted, or one for all is added, which softmax doesn't see."""


@dataclass(frozen=True)
class Floor:
    """Scores of -inf become finite, which is seen in a row that sees nothing."""


@dataclass(frozen=True)
class Cast:
    dtype: torch.dtype


@dataclass(frozen=True)
class Mask:
    """``kind`` "keep", "drop" (bool, see masks.prove) with the score of hidden pairs, or "additive".

    ``factor``: what the scores were scaled by after an additive mask; negative if it is subtracted.
    """

    kind: str
    mask: fx.Node
    at: fx.Node
    fill: float = -math.inf
    factor: float = 1.0
    floor: bool = False  # -inf is made finite afterwards


@dataclass(frozen=True)
class Sink:
    """A column of ``node`` [..., queries, 1] is put behind the scores, or before them; see sinks.py."""

    node: fx.Node
    at: fx.Node
    first: bool


Step = Scale | Factor | Tanh | Shift | Floor | Cast | Mask | Sink


@dataclass(frozen=True)
class Scoring:
    """scores = mask(softcap(scale * factors * q @ k.T))."""

    scale: float
    softcap: float | None
    masks: list[Mask]
    dtypes: set[torch.dtype]
    sink: Sink | None = None
    factors: tuple[Factor, ...] = ()


def interpret(steps: list[Step]) -> Scoring:
    """What the steps after the product compute, or Refused if no AttentionSpec says it."""
    scale, cap, masks, dtypes = 1.0, None, [], set()
    capped: float | None = None  # the factor inside tanh, once there was one
    sink: Sink | None = None
    factors: list[Factor] = []
    shifted = False
    for step in steps:
        if sink is not None and not isinstance(step, (Cast, Shift)):
            raise Refused("the scores are changed after the attention sink was put next to them; do it before")
        if isinstance(step, Sink):
            if shifted:
                raise Refused(
                    "something is subtracted from the scores before the attention sink is put next to them; "
                    "subtract the maximum after it"
                )
            sink = step
        elif isinstance(step, Cast):
            dtypes.add(step.dtype)
        elif isinstance(step, Mask):
            masks.append(step)
        elif isinstance(step, Tanh):
            if capped is not None or masks:
                raise Refused("tanh comes twice, or after a mask; apply one softcap, before masks and biases")
            capped, cap = scale, 1.0
        elif isinstance(step, Factor):
            if masks or cap is not None:
                raise Refused(
                    f"masked or capped scores are scaled by the tensor `{step.node.name}`; "
                    "scale before masks, biases and the softcap"
                )
            factors.append(step)
        elif isinstance(step, Shift):
            shifted = True
        elif isinstance(step, Floor):
            masks = [replace(m, floor=True) for m in masks]
        elif isinstance(step, Scale):
            if not math.isfinite(step.factor):
                raise Refused(
                    f"the scores are scaled by {step.factor:g}, which isn't a finite number; use a finite scale"
                )
            if step.factor <= 0 and (masks or cap is not None):
                raise Refused(
                    f"masked or capped scores are scaled by {step.factor:g}, which isn't a positive number; "
                    "scale before the mask or softcap, or by a positive number"
                )
            masks = [_scaled(m, step.factor) for m in masks]
            if cap is None:
                scale *= step.factor
            else:
                cap *= step.factor
    if any(isinstance(s, Shift) for s in steps[: _index_of_tanh(steps)]):
        raise Refused(
            "something is subtracted from the scores before the softcap; "
            "subtract it after the softcap, or leave out the maximum"
        )
    if capped is not None and cap is not None:
        scale = capped * cap  # cap * tanh(capped * x) == cap * tanh(scale * x / cap)
    for mask in masks:
        if mask.kind != "additive" and mask.fill > NEGLIGIBLE:
            raise Refused(f"masked scores are set to {mask.fill:g}, which does not hide them; use float('-inf')")
    return Scoring(scale, cap, masks, dtypes, sink, tuple(factors))


def _index_of_tanh(steps: list[Step]) -> int:
    return next((i for i, s in enumerate(steps) if isinstance(s, Tanh)), 0)


def _scaled(mask: Mask, factor: float) -> Mask:
    return replace(mask, fill=mask.fill * factor, factor=mask.factor * factor)
