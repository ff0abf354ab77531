"""Which probabilities attention dropout keeps: one 32-bit word of a counter-based generator for each pair."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int], rounds: int = ROUNDS) -> list[Tensor]:
    """Philox 4x32 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011).

    Counters are int64 tensors with values below 2**32, and so are the four results.  7 rounds are the fewest that pass
    BigCrush (their table 2).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return [c0, c1, c2, c3]


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b, whose 64 bits int64 can't hold: as a sum of halves."""
    upper, lower = (a >> 16) * b, (a & 0xFFFF) * b
    total_middle = upper + (lower >> 16)
    return total_middle >> 16, ((total_middle & 0xFFFF) << 16) | (lower & 0xFFFF)


def kept(batch: int, heads: int, q_len: int, kv_len: int, dropout_p: float, rng_state: Tensor) -> Tensor:
    """Bool [batch, heads, q_len, kv_len]: True where the probability of the pair isn't dropped.

    ``rng_state`` int64 [2] is seed and offset.  Counter (j // 4, i, b * heads + h, offset), key (low, high half of the
    seed), word j % 4; kept iff word >= floor(p * 2**32).
    """
    seed, offset = rng_state.tolist()
    device = rng_state.device
    head = torch.arange(batch * heads, device=device).view(-1, 1, 1)
    row = torch.arange(q_len, device=device).view(1, -1, 1)
    group = torch.arange((kv_len + 3) // 4, device=device).view(1, 1, -1)
    counter = (group, row, head, torch.full((1, 1, 1), offset & _LOW, device=device))
    words = torch.stack(torch.broadcast_tensors(*philox(counter, (seed & _LOW, (seed >> 32) & _LOW))), -1)
    return (words.flatten(2)[..., :kv_len] >= int(dropout_p * 2**32)).unflatten(0, (batch, heads))
