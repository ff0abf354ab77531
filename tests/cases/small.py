"""Small pieces of attention code that cases share."""

import torch

NEG = float("-inf")


def attn(q, k, v, scale=None, mask=None, bias=None):
    """The textbook graph. mask: bool, True = keep."""
    s = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        s = s + bias
    if mask is not None:
        s = s.masked_fill(~mask, NEG)
    return torch.softmax(s, -1) @ v


def gap(lq, lk, dev, shift=0):
    """gap[i, j] = i + shift - j"""
    return torch.arange(lq, device=dev)[:, None] + shift - torch.arange(lk, device=dev)[None, :]


def close(a, b, tol):
    e = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
    m = b.double().abs().max().item() if b.numel() else 0.0
    return e <= tol * (1 + m)
