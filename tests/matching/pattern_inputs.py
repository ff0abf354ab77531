"""Masks and repeats of heads as people write them."""

from __future__ import annotations

import torch

INF = float("inf")


def hidden(n: int, m: int | None = None) -> torch.Tensor:
    return torch.ones(n, n if m is None else m, dtype=torch.bool).triu(1)


def seen(n: int) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def minus(n: int, value: float = -INF) -> torch.Tensor:
    return torch.full((n, n), value).triu(1)


def hf_mask(n: int, window: int | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    i, j = torch.arange(n)[None, None, :, None], torch.arange(n)[None, None, None, :]
    m = j <= i
    if window is not None:
        m = m & (j > i - window)
    return torch.where(m, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)


def repeat_kv(x: torch.Tensor, n: int) -> torch.Tensor:
    b, h, s, d = x.shape
    return x[:, :, None, :, :].expand(b, h, n, s, d).reshape(b, h * n, s, d)
