"""Autograd functions under torch.func's transforms (grad, vjp, vmap of them), and forward-mode AD."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)`` inside an op's Autograd kernel, also while a transform is active.

    ``apply`` then wants to enter the transforms by itself, but the dispatcher has done so: it calls the kernel once for
    each level of torch.func.grad, and below Autograd goes on to the next level, as for every op of ATen.
    """
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    from torch._functorch.utils import enable_single_level_autograd_function

    with enable_single_level_autograd_function():
        return _of_one_level(function).apply(*args)


@cache
def _of_one_level(function: type[torch.autograd.Function]) -> Any:
    """The same function as one that doesn't know of transforms: what functorch itself makes for each level."""
    methods = {"forward": staticmethod(function.forward), "backward": staticmethod(function.backward)}
    return type(function.__name__, (torch.autograd.function._SingleLevelFunction,), methods)


def has_tangent(tensors: Sequence[Any]) -> bool:
    """Whether forward-mode AD (torch.func.jvp, jacfwd, hessian; torch.autograd.forward_ad) looks at one of these."""
    if getattr(forward_ad, "_current_level", 0) < 0:
        return False
    return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
