"""The optional tensors of ``flashbwd::attn``: their names in the order of the schema, and what every device shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Extras:
    """The optional tensors of one call; see :mod:`flash_inductor.reference` for what they mean."""

    bias: Tensor | None = None
    mask: Tensor | None = None
    query_segments: Tensor | None = None
    key_segments: Tensor | None = None
    sinks: Tensor | None = None
    rng_state: Tensor | None = None
    key_range: Tensor | None = None
    query_range: Tensor | None = None

    def given(self) -> dict[str, Tensor]:
        """Those that aren't None, by name."""
        if self is NO_EXTRAS:
            return {}
        return {name: x for name in EXTRAS if (x := getattr(self, name)) is not None}


EXTRAS = tuple(field.name for field in fields(Extras))
NO_EXTRAS = Extras()
_NAMES = frozenset(EXTRAS)


def take_extras(positional: Sequence[Tensor | None], keywords: dict[str, Any]) -> Extras:
    """The optional tensors of a call, whether they came by position or by name; removed from ``keywords``."""
    if (not positional or all(x is None for x in positional)) and _NAMES.isdisjoint(keywords):
        return NO_EXTRAS
    named = {name: keywords.pop(name) for name in EXTRAS if name in keywords}
    return Extras(**dict(zip(EXTRAS, positional, strict=False)), **named)


def grad_sinks(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor, dims: Sequence[int] = (0, 2)
) -> Tensor:
    """The gradient of the sinks [Hq] from what every backward has: -sum_{b,i} exp(sink_h - lse) * delta.

    ``delta`` is rowsum(grad_out * out) - grad_lse, as for the scores: a sink is a score whose value is 0.
    """
    wide = lse.dtype
    delta = (grad_out.to(wide) * out.to(wide)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    # A sink of -inf takes no part, also in a row that sees nothing, whose lse is then -inf too.
    share = torch.where(lse == -torch.inf, 0, torch.exp(sinks.to(wide).unsqueeze(-1) - lse))
    return -(share * delta).sum(list(dims)).to(sinks.dtype)
