"""A mask as what ``flash_inductor.attention`` takes: a band, padded keys, segments; dense only as a last resort."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..spec import MaskSpec
from ..support import effective_mask

Int = Any  # int | torch.SymInt


@dataclass(frozen=True, eq=False)
class MaskStructure:
    """Which keys each query sees: the conjunction of all that is given.

    It stands where a bool mask [batch, 1, q_length, kv_length] would, and is no tensor on purpose: code that would add
    it to scores or cut it gets an error instead of a wrong result.

    Attributes:
        batch, q_length, kv_length: the sizes it is made for.
        device: where the attention is.
        lower, upper: bounds on key index - query index, None for unbounded.
        keys: bool [batch or 1, kv_length], True where a key is real.
        query_segments, key_segments: int32 [batch or 1, length]; a query sees keys of its own segment.
        opaque: bool [batch or 1, 1, q_length, kv_length], True where seen: what can't be told apart.
    """

    batch: Int
    q_length: Int
    kv_length: Int
    device: torch.device | str = "cpu"
    lower: Int | None = None
    upper: Int | None = None
    keys: Tensor | None = None
    query_segments: Tensor | None = None
    key_segments: Tensor | None = None
    opaque: Tensor | None = None

    @property
    def shape(self) -> tuple[Int, ...]:
        return (self.batch, 1, self.q_length, self.kv_length)

    @property
    def ndim(self) -> int:
        return 4

    def to(self, device: Any = None, dtype: Any = None, **_: Any) -> MaskStructure:
        """The same on another device; a change of dtype is refused, since what it would mean differs."""
        if isinstance(device, torch.dtype) or dtype not in (None, torch.bool):
            raise TypeError("a flash_inductor mask is True where a key is seen and has no other dtype; " + _REMEDY)
        moved = {
            name: x.to(device)
            for name in ("keys", "query_segments", "key_segments", "opaque")
            if (x := getattr(self, name)) is not None
        }
        return replace(self, device=self.device if device is None else device, **moved)

    def __getitem__(self, index: Any) -> MaskStructure:
        """Only what keeps everything: ``mask[:, :, :, :n]`` with n at least the number of keys."""
        parts = index if isinstance(index, tuple) else (index,)
        for i, (part, size) in enumerate(zip(parts, self.shape, strict=False)):
            whole = isinstance(part, slice) and part.start in (None, 0) and part.step in (None, 1)
            if part is Ellipsis or not whole or not (part.stop is None or (i == 3 and part.stop >= size)):
                raise TypeError(f"a flash_inductor mask can't be indexed by {index!r}; " + _REMEDY)
        return self

    def is_full(self) -> bool:
        """Whether every query is known to see every key."""
        tensors = (self.keys, self.query_segments, self.key_segments, self.opaque)
        band = effective_mask(MaskSpec(self.lower, self.upper), self.q_length, self.kv_length)
        return all(x is None for x in tensors) and band.lower is None and band.upper is None

    def dense(self) -> Tensor:
        """bool [batch, 1, q_length, kv_length], True where seen."""
        query, key = (torch.arange(n, device=self.device) for n in (self.q_length, self.kv_length))
        distance = key - query[:, None]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.lower is not None:
            seen = seen & (distance >= self.lower)
        if self.upper is not None:
            seen = seen & (distance <= self.upper)
        seen = seen[None, None]
        if self.keys is not None:
            seen = seen & self.keys[:, None, None]
        if self.query_segments is not None and self.key_segments is not None:
            seen = seen & (self.query_segments[:, None, :, None] == self.key_segments[:, None, None])
        if self.opaque is not None:
            seen = seen & self.opaque
        return seen.expand(self.batch, 1, self.q_length, self.kv_length)

    def operands(self) -> dict[str, Any]:
        """Keyword arguments of :func:`flash_inductor.attention`."""
        window = MaskSpec(self.lower, self.upper).to_window()
        mask = None if self.keys is None else self.keys[:, None, None]
        if self.opaque is not None:
            mask = self.opaque if mask is None else self.opaque & mask
        return {
            "is_causal": window.get("is_causal", False),
            "window_size": (window.get("window_left"), window.get("window_right")),
            "diagonal": window.get("diagonal", 0),
            "mask": mask,
            "query_segments": self.query_segments,
            "key_segments": self.key_segments,
        }


_REMEDY = 'this model handles masks itself, use attn_implementation="sdpa" with flash_inductor.enable() for it'
