"""The problems whose errors are measured: ordinary ones for each dtype and head dim, and hard ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flash_inductor.spec import AttentionSpec, MaskSpec

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
DTYPES = ("float32", "bfloat16", "float16")
ORDINARY = "ordinary"
Change = Callable[[list[Tensor]], None]  # of query, key, value, grad_out, in place


@dataclass(frozen=True)
class Case:
    """One problem: [1, heads, length, head dim] of normal numbers, then changed."""

    group: str
    dtype: str
    q_len: int
    kv_len: int
    dims: tuple[int, int] = (64, 64)
    heads: int = 4
    options: dict[str, Any] = field(default_factory=dict)
    change: Change | None = None

    @property
    def name(self) -> str:
        return (
            f"{self.group}: {self.dtype} {self.q_len}x{self.kv_len} D{'/'.join(map(str, sorted(set(self.dims))[::-1]))}"
        )

    @property
    def spec(self) -> AttentionSpec:
        band = {k: v for k, v in self.options.items() if k not in ("scale", "softcap")}
        scale, softcap = self.options.get("scale"), self.options.get("softcap")
        return AttentionSpec(scale, MaskSpec.from_window(**band), softcap)

    def tensors(self, device: str) -> list[Tensor]:
        """query, key, value, grad_out; the same numbers on every device."""
        generator = torch.Generator().manual_seed(0)
        (d, dv), h = self.dims, self.heads
        shapes = ((self.q_len, d), (self.kv_len, d), (self.kv_len, dv), (self.q_len, dv))
        found = [torch.randn((1, h, *shape), generator=generator) for shape in shapes]
        if self.change is not None:
            self.change(found)
        return [x.to(device, getattr(torch, self.dtype)) for x in found]


def _scaled(factor: float) -> Change:
    def change(tensors: list[Tensor]) -> None:
        tensors[0].mul_(factor)

    return change


def _far_from_zero(tensors: list[Tensor]) -> None:
    """Products q.k of about 90,000, beyond what fp16 holds, that differ by ordinary amounts."""
    for x in tensors[:2]:
        x[..., 0] = 300.0


def _poisoned(which: int, row: int, number: float) -> Change:
    def change(tensors: list[Tensor]) -> None:
        tensors[which][:, :, row] = number

    return change


def cases(device: str) -> list[Case]:
    """All problems; the CPU gets shorter ones."""
    n, long = (1024, 65536) if device == "cuda" else (384, 65536)
    causal = {"is_causal": True}
    found = [Case(ORDINARY, dtype, n, n, dims, options=causal) for dtype in DTYPES for dims in HEAD_DIMS]
    for dtype in DTYPES:
        found += [
            Case("large logits", dtype, n, n, options=causal, change=_scaled(64.0)),
            Case("softcap at saturation", dtype, n, n, options={**causal, "softcap": 5.0}, change=_scaled(64.0)),
            Case("products beyond fp16", dtype, n, n, options=causal, change=_far_from_zero),
            Case("window", dtype, n, n, options={**causal, "window_left": 100}),
            Case("rows that see nothing", dtype, n, n - 100, options={**causal, "diagonal": -100}),
        ]
        if device == "cpu":
            found.append(Case("long rows", dtype, 16, long, heads=1))
        elif dtype != "float32":
            found += [Case("long rows", dtype, long, long, (128, 128), 1, options=o) for o in ({}, causal)]
    # The last key is seen by the last query only; of a query that is NaN, everything is.
    nan = math.nan
    poisons = [
        (f"{word} in the last {what}", 256, _poisoned(which, -1, number))
        for word, number in (("NaN", nan), ("inf", math.inf), ("-inf", -math.inf))
        for which, what in enumerate(("query", "key", "value"))
    ]
    # Keys from 200 on are seen by nobody.
    poisons += [(f"NaN in an unseen {what}", 200, _poisoned(i, 200, nan)) for i, what in ((1, "key"), (2, "value"))]
    found += [Case(name, "bfloat16", rows, 256, options=causal, change=change) for name, rows, change in poisons]
    return found
