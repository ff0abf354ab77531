"""torch.nn.attention: this package's kernels as the FlashAttention of ``scaled_dot_product_attention`` on CUDA.

    import torch.nn.attention
    from flash_inductor.integrations import torch_attention
    torch_attention.register()
    torch.nn.attention.activate_flash_attention_impl("flash_inductor")  # restore_flash_attention_impl() undoes it

It changes what SDPA runs where torch chooses FlashAttention: 16-bit inputs without a mask, full or causal.  Masks,
windows and softcaps never come this way.  What :func:`flash_inductor.enable` does for compiled code is independent.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import register_flash_attention_impl

from ..ops import attn, attn_backward
from ..spec import AttentionSpec
from ..support import unsupported_reasons

NAME = "flash_inductor"
FORWARD = "_scaled_dot_product_flash_attention"
BACKWARD = "_scaled_dot_product_flash_attention_backward"


def register() -> None:
    """Make ``torch.nn.attention.activate_flash_attention_impl("flash_inductor")`` known.  Activates nothing."""
    register_flash_attention_impl(NAME, register_fn=lambda: Handle("CUDA"))


class Handle:
    """The overrides of ATen's ops on one device, until :meth:`remove`.

    Calls that aren't supported (dropout, a debug mask, inputs without kernels) go to torch's own kernel, so do those
    that this package's choice of a kernel leaves to it.
    """

    def __init__(self, dispatch_key: str, stock: dict[str, Any] | None = None) -> None:
        self.stock = stock or {
            name: torch.library.get_kernel(f"aten::{name}", dispatch_key) for name in (FORWARD, BACKWARD)
        }
        self.keys = torch.DispatchKeySet(getattr(torch.DispatchKey, dispatch_key))
        self.inside: ContextVar[bool] = ContextVar("flash_inductor_sdpa", default=False)
        self.library: Any = torch.library.Library("aten", "IMPL")
        self.library.impl(FORWARD, self.forward, dispatch_key, allow_override=True)
        self.library.impl(BACKWARD, self.backward, dispatch_key, allow_override=True)

    def remove(self) -> None:
        """Called by ``restore_flash_attention_impl``."""
        self.library._destroy()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        """``aten::_scaled_dot_product_flash_attention``."""
        if self._is_stock(query, key, value, dropout_p, is_causal) or return_debug_mask:
            return self.stock[FORWARD].call_boxed(
                self.keys, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale
            )
        token = self.inside.set(True)
        try:
            out, lse = attn(query, key, value, scale=scale, is_causal=is_causal)
        finally:
            self.inside.reset(token)
        state = query.new_zeros(2, dtype=torch.uint64)  # of a dropout that isn't there
        return out, lse, None, None, query.shape[2], key.shape[2], state, state[0], query.new_empty(0)

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Tensor,
        philox_offset: Tensor,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``aten::_scaled_dot_product_flash_attention_backward``."""
        if self._is_stock(query, key, value, dropout_p, is_causal):
            return self.stock[BACKWARD].call_boxed(
                self.keys, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                is_causal, philox_seed, philox_offset, scale=scale,
            )  # fmt: skip
        token = self.inside.set(True)
        try:
            grads = attn_backward(grad_out, None, query, key, value, out, logsumexp, scale=scale, is_causal=is_causal)
        finally:
            self.inside.reset(token)
        return grads[0], grads[1], grads[2]

    def _is_stock(self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool) -> bool:
        """Whether torch's own kernel is to run: asked for by the op, or by what the op doesn't compute alike."""
        if self.inside.get() or dropout_p > 0 or query.dim() != 4:
            return True
        if is_causal and query.shape[2] != key.shape[2]:
            return True  # torch's kernels don't agree on what it means then
        return bool(
            unsupported_reasons(
                AttentionSpec(), query.shape, key.shape, value.shape, str(query.dtype)[6:], query.device.type
            )
        )
