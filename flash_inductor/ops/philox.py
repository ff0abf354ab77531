"""Philox 4x32 with 7 rounds for the CPU kernels: :mod:`flash_inductor.reference.dropout` says what it computes."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_WEYL0, _WEYL1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 7


def kept(heads: Tensor, rows: range, columns: range, dropout_p: float, rng_state: Tensor) -> Tensor:
    """Bool [*heads.shape, rows, columns]: True where dropout keeps the pair; ``heads`` int64 holds b * Hq + h."""
    seed, offset = rng_state.tolist()
    threshold = int(dropout_p * 2**32)
    first = columns.start // 4
    c0 = torch.arange(first, (columns.stop + 3) // 4)
    c1 = torch.arange(rows.start, rows.stop).unsqueeze(1)
    c2 = heads[..., None, None]
    words = _philox(c0, c1, c2, offset & _LOW, seed & _LOW, (seed >> 32) & _LOW)
    shape = (*heads.shape, len(rows), len(c0))
    keep = torch.stack([(word >= threshold).expand(shape) for word in words], -1).flatten(-2)
    skip = columns.start - 4 * first
    return keep[..., skip : skip + len(columns)]


def _philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: int | Tensor, k0: int, k1: int) -> tuple[Tensor, ...]:
    """The four words; the counters broadcast, so the first rounds are computed on rows and columns alone."""
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_M0, c0)
        high1, low1 = _multiply(_M1, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL0) & _LOW, (k1 + _WEYL1) & _LOW
    return c0, c1, c2, c3  # type: ignore[return-value]


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low half of a * b for numbers below 2**32, whose product int64 can't hold: it wraps, low half intact."""
    high = (b * (a >> 16)).add_((b * (a & 0xFFFF)).bitwise_right_shift_(16)).bitwise_right_shift_(16)
    return high, (b * a).bitwise_and_(_LOW)
