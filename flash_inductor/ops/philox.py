"""Philox 4x32 with 7 rounds for the CPU kernels: :mod:`flash_inductor.reference.dropout` says what it computes."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_WEYL0, _WEYL1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 7
_CHUNK = 1 << 14  # words per pass: the hundred passes over them stay in the cache


def dropped(heads: Tensor, rows: range, columns: range, dropout_p: float, rng_state: Tensor) -> Tensor:
    """Bool [*heads.shape, rows, columns]: True where dropout drops the pair; ``heads`` int64 holds b * Hq + h."""
    seed, offset = rng_state.tolist()
    threshold = int(dropout_p * 2**32)
    first = columns.start // 4
    groups = torch.arange(first, (columns.stop + 3) // 4)
    drop = torch.empty((heads.numel(), len(rows), len(groups), 4), dtype=torch.bool)
    row_step = max(1, _CHUNK // max(1, len(groups)))
    head_step = max(1, _CHUNK // max(1, len(groups) * len(rows)))
    for some_heads, head_part in zip(drop.split(head_step), heads.reshape(-1, 1, 1).split(head_step), strict=True):
        for start in range(0, len(rows), row_step):
            part = some_heads[:, start : start + row_step]
            queries = torch.arange(rows.start + start, rows.start + start + part.shape[1]).unsqueeze(1)
            words = _philox(groups, queries, head_part, offset & _LOW, seed & _LOW, (seed >> 32) & _LOW)
            for i, word in enumerate(words):
                torch.lt(word, threshold, out=part[..., i])
    skip = columns.start - 4 * first
    return drop.flatten(2)[..., skip : skip + len(columns)].view(*heads.shape, len(rows), len(columns))


def _philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: int | Tensor, k0: int, k1: int) -> tuple[Tensor, ...]:
    """The four words; the counters broadcast, so the first rounds are computed on rows and columns alone."""
    for _ in range(_ROUNDS):
        # The product of two numbers below 2**32 wraps to a negative int64, but none of its 64 bits is lost.
        product0, product1 = c0 * _M0, c2 * _M1
        c0 = ((product1 >> 32) ^ (c1 ^ k0)).bitwise_and_(_LOW)
        c2 = ((product0 >> 32) ^ (c3 ^ k1)).bitwise_and_(_LOW)
        c1, c3 = product1.bitwise_and_(_LOW), product0.bitwise_and_(_LOW)
        k0, k1 = (k0 + _WEYL0) & _LOW, (k1 + _WEYL1) & _LOW
    return c0, c1, c2, c3  # type: ignore[return-value]
