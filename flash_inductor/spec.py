"""What one attention site computes, apart from its tensors: scale, visible band, softcap, words for the rest.

Torch-free on purpose: matching, ops, lowering and kernels all speak in these terms, and each of them can be
tested without the others.  Sizes may be ``torch.SymInt``; nothing here compares a symbolic size, because a
comparison would put a guard on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

Int = Any  # int | torch.SymInt


@dataclass(frozen=True)
class MaskSpec:
    """Query ``i`` sees key ``j`` iff ``lower <= j - i <= upper``; ``None`` means unbounded.

    One pair of numbers carries causal masks (``upper == 0``), sliding windows, both sides and both alignments
    (bottom-right aligned causal is ``upper == Nk - Nq``).
    """

    lower: Int | None = None
    upper: Int | None = None

    @classmethod
    def from_window(
        cls,
        is_causal: bool = False,
        window_left: Int | None = None,
        window_right: Int | None = None,
        diagonal: Int = 0,
    ) -> MaskSpec:
        """The band of the op's arguments: ``-window_left <= j - (i + diagonal) <= window_right``, causal = right 0."""
        right = 0 if is_causal else window_right
        return cls(
            lower=None if window_left is None else diagonal - window_left,
            upper=None if right is None else diagonal + right,
        )

    def to_window(self) -> dict[str, Any]:
        """Keyword arguments of ``flashbwd::attn`` for this band, defaults left out.

        The inverse of :meth:`from_window` up to the choice of ``diagonal``.  Raises ValueError for an empty band,
        which no pair of non-negative window sizes can express.
        """
        lower, upper = self.lower, self.upper
        if lower is None and upper is None:
            return {}
        if isinstance(lower, int) and isinstance(upper, int) and lower > upper:
            raise ValueError(f"the band lower={lower} > upper={upper} sees nothing")
        # The diagonal is 0 where both distances from it are then known to be >= 0, else one of the bounds.
        zero_ok = all(b is None or isinstance(b, int) for b in (lower, upper)) and (lower or 0) <= 0 <= (upper or 0)
        diagonal = 0 if zero_ok else upper if upper is not None else lower
        kwargs: dict[str, Any] = {} if zero_ok else {"diagonal": diagonal}
        if lower is not None:
            kwargs["window_left"] = diagonal - lower
        if upper is diagonal or (zero_ok and upper == 0):
            kwargs["is_causal"] = True
        elif upper is not None:
            kwargs["window_right"] = upper - diagonal
        return kwargs

    def __and__(self, other: MaskSpec) -> MaskSpec:
        """Both bands at once.  Only for plain ints: the tighter of two symbolic bounds can't be known."""

        def pick(a: Int | None, b: Int | None, choose: Any) -> Int | None:
            if a is None or b is None:
                return b if a is None else a
            if a is b:
                return a
            if not (isinstance(a, int) and isinstance(b, int)):
                raise TypeError("symbolic bounds can't be intersected")
            return choose(a, b)

        return MaskSpec(pick(self.lower, other.lower, max), pick(self.upper, other.upper, min))

    def describe(self) -> str:
        """Words for reports: 'full', 'causal', 'causal, window 1024', 'window 3 left, 5 right'."""
        lower, upper = self.lower, self.upper
        if lower is None and upper is None:
            return "full"
        if isinstance(upper, int) and upper == 0:
            return "causal" if lower is None else f"causal, window {-lower}"
        if upper is not None and lower is None:
            return f"causal, diagonal {upper}"
        if isinstance(lower, int) and isinstance(upper, int) and lower <= 0 <= upper:
            return f"window {-lower} left, {upper} right"
        return f"band {lower} <= k - q <= {upper}"


@dataclass(frozen=True)
class AttentionSpec:
    """One attention site: scores = scale * q @ k.T, softcap, band mask, softmax, @ v.

    ``scale`` None means ``1 / sqrt(head dim of q)``.  ``softcap`` None means no cap, else ``c * tanh(s / c)``.
    ``extras`` names what else the site has, for reports: "padding", "bias", "dropout 0.1", "sinks", "segments".
    """

    scale: float | None = None
    mask: MaskSpec = MaskSpec()
    softcap: float | None = None
    extras: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.softcap is not None and not (self.softcap > 0 and math.isfinite(self.softcap)):
            raise ValueError(f"softcap: expected a positive finite number or None, got {self.softcap}")

    def op_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of ``flashbwd::attn``, defaults left out."""
        kwargs = self.mask.to_window()
        if self.scale is not None:
            kwargs["scale"] = float(self.scale)
        if self.softcap is not None:
            kwargs["softcap"] = float(self.softcap)
        return kwargs

    def describe(self) -> str:
        """One line for reports, e.g. 'causal, window 1024, padding, softcap 50, scale 0.0625'."""
        parts = [self.mask.describe(), *self.extras]
        if self.softcap is not None:
            parts.append(f"softcap {self.softcap:g}")
        if self.scale is not None:
            parts.append(f"scale {self.scale:g}")
        return ", ".join(parts)
