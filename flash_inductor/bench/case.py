"""One attention problem to measure, and how much work it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DTYPES = {"bfloat16": "", "float16": " fp16", "float32": " fp32"}


@dataclass(frozen=True)
class Case:
    """One problem.  Lengths of queries and keys are equal, so both alignments of a causal mask mean the same.

    Attributes:
        group: part of the grid it belongs to; the summary has one table for each.
        window: a query sees keys up to this far to the left, and to the right unless ``causal``.
        layout: "bhnd" for contiguous [B, H, N, D] tensors, "bnhd" for views of [B, N, H, D] memory, as models have.
        importance: lower is measured earlier.
    """

    group: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    causal: bool
    window: int | None = None
    softcap: float | None = None
    v_head_dim: int = 0  # 0: that of the keys
    dtype: str = "bfloat16"
    layout: str = "bhnd"
    deterministic: bool = False
    importance: int = 0

    @property
    def value_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that see each other, in one head."""
        n = self.length
        reach = n if self.window is None else self.window
        left = sum(min(i, reach) for i in range(n))
        return n + left * (1 if self.causal else 2)

    @property
    def flops(self) -> dict[str, float]:
        """Of the products over visible pairs, two forward and five backward; what a kernel recomputes doesn't count."""
        d, dv = self.head_dim, self.value_dim
        one = 2.0 * self.batch * self.heads * self.pairs
        return {"forward": one * (d + dv), "backward": one * (3 * d + 2 * dv)}

    @property
    def band(self) -> tuple[int | None, int | None]:
        """(lower, upper): query i sees key j iff lower <= j - i <= upper."""
        return None if self.window is None else -self.window, 0 if self.causal else self.window

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``flashbwd::attn``, defaults left out."""
        right = None if self.causal else self.window
        options = {"is_causal": self.causal, "window_left": self.window, "window_right": right, "softcap": self.softcap}
        return {name: value for name, value in options.items() if value is not None and value is not False}

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.value_dim == self.head_dim else f"{self.head_dim}/{self.value_dim}"
        kind = "causal" if self.causal else "full"
        window = "" if self.window is None else f" window {self.window}"
        cap = "" if self.softcap is None else f" softcap {self.softcap:g}"
        rest = DTYPES[self.dtype] + (" deterministic" if self.deterministic else "")
        rest += "" if self.layout == "bhnd" else f" {self.layout}"
        return f"B{self.batch} H{self.heads}/{self.kv_heads} N{self.length} D{dims} {kind}{window}{cap}{rest}"
