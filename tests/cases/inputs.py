"""Inputs of cases: the same numbers on every device and in every dtype, and copies that keep the layout."""

import zlib

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


class Maker:
    """Seeded input maker: same numbers on every device and in every dtype (rounded)."""

    def __init__(self, name, dev, dt):
        self.g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        self.dev, self.dt = dev, DTYPES[dt] if isinstance(dt, str) else dt

    def __call__(self, *shape, scale=1.0, dtype=None):
        x = torch.randn(*shape, generator=self.g) * scale
        return x.to(dtype or self.dt).to(self.dev)

    def coin(self, *shape, p=0.5):
        return (torch.rand(*shape, generator=self.g) < p).to(self.dev)

    def ints(self, lo, hi, shape):
        return torch.randint(lo, hi, shape, generator=self.g).to(self.dev)


def relayout(t, order):
    """Same values and sizes, memory laid out in the given dim order (outer to inner)."""
    inv = [order.index(i) for i in range(t.dim())]
    return t.permute(order).contiguous().permute(inv)


def as_is(t, dtype=None):
    """Copy that keeps sizes, strides (also 0) and storage offset."""
    if t.numel() == 0:
        return t.detach().clone().to(dtype or t.dtype)
    ext = t.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    flat = t.detach().as_strided((ext,), (1,), 0).clone()
    if dtype is not None:
        flat = flat.to(dtype)
    return flat.as_strided(t.shape, t.stride(), t.storage_offset())


def clone_args(args, diff, dtype=None):
    """dtype: cast floating tensors to it. The same tensor object twice stays one object."""
    memo, out = {}, []
    for a in args:
        if not isinstance(a, torch.Tensor):
            out.append(a)
            continue
        if id(a) not in memo:
            flt = a.is_floating_point()
            memo[id(a)] = as_is(a, dtype if flt else None)
        out.append(memo[id(a)])
    if diff is None:
        diff = tuple(i for i, a in enumerate(out) if isinstance(a, torch.Tensor) and a.is_floating_point())
    for i in diff:
        out[i].requires_grad_(True)
    return out, diff
