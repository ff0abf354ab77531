"""The op ``flashbwd::attn`` and everything PyTorch needs to know of it; importing this registers it."""

from . import autograd, dtensor, transforms
from .layout import empty_like_layout
from .library import attn, attn_backward, block_ranges

__all__ = ["attn", "attn_backward", "autograd", "block_ranges", "dtensor", "empty_like_layout", "transforms"]
