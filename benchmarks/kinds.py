"""What a GPU spends its time on in a training step: attention, matrix products, Inductor's fused kernels, the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_OURS = ("forward_kernel", "backward_kernel", "backward_wide_kernel", "prepare_kernel", "finish_kernel")
_ATTENTION = ("flash", "fmha", "attention", "sdpa")
_PRODUCTS = ("nvjet", "gemm", "cutlass", "_mm", "bmm")


def kind_of(kernel: str) -> str:
    """By the name that a profile gives: "attention", "products", "fused" or "other"."""
    name = kernel.lower()
    if name.startswith("triton_") and not name.startswith("triton_tem"):
        return "fused"  # its name lists what it computes, or what that came from
    if kernel in _OURS or any(word in name for word in _ATTENTION):
        return "attention"
    return "products" if any(word in name for word in _PRODUCTS) else "other"


def sums(kernels: Iterable[tuple[str, float]], steps: int) -> dict[str, float]:
    """Milliseconds a step of each kind, from (name, microseconds) of ``steps`` steps."""
    found: dict[str, float] = {}
    for name, us in kernels:
        found[kind_of(name)] = found.get(kind_of(name), 0.0) + us / 1e3 / steps
    return found


def gpu_ms(step: Callable[[], Any], steps: int = 3) -> dict[str, float]:
    """Milliseconds that a step keeps the GPU busy, by kind."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return sums(((e.name, e.device_time) for e in profile.events() if e.device_type == cuda), steps)
