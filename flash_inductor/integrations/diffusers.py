"""Diffusers: an attention backend "flash_inductor" for the models that dispatch their attention (DiTs).

    from flash_inductor.integrations import diffusers
    diffusers.register()
    transformer.set_attention_backend("flash_inductor")

It needs no torch.compile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..functional import attention

NAME = "flash_inductor"


def register() -> None:
    """Make ``set_attention_backend("flash_inductor")`` and ``attention_backend("flash_inductor")`` work.

    May be called again.  Raises ImportError if diffusers isn't installed or has no attention backends (before 0.35),
    and NotImplementedError if its list of backends can't be added to.
    """
    from diffusers.models import attention_dispatch

    names, registry = attention_dispatch.AttentionBackendName, attention_dispatch._AttentionBackendRegistry
    if NAME not in names._value2member_map_:
        _add_member(names, "FLASH_INDUCTOR", NAME)
    registry.register(names(NAME))(attention_backend)


def _add_member(enum: Any, name: str, value: str) -> None:
    """Diffusers takes members of this enumeration only, and offers no way to add one."""
    try:
        member = str.__new__(enum, value)
        member._name_, member._value_ = name, value
        enum._member_map_[name] = member
        enum._member_names_.append(name)
        enum._value2member_map_[value] = member
    except (AttributeError, TypeError) as error:
        raise NotImplementedError(f"diffusers: expected a str enumeration of backends, got {enum!r}") from error


def attention_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """The backend: query [B, N, H, D], key and value [B, M, Hk, D] -> [B, N, H, D], and lse [B, N, H] if asked for.

    ``attn_mask`` is bool (True = seen) or added to the scores; [B, M] says which keys are real, else it broadcasts to
    [B, H, N, M].

    Raises NotImplementedError under context parallelism.
    """
    if _parallel_config is not None:
        raise NotImplementedError('context parallelism: not supported; use the backend "native" for it')
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    operands: dict[str, Any] = {}
    if attn_mask is not None:
        attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + attn_mask.shape)
        operands["mask" if attn_mask.dtype is torch.bool else "bias"] = attn_mask
    out, lse = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        scale=scale,
        is_causal=is_causal,
        dropout_p=dropout_p,
        return_lse=True,
        **operands,
    )
    out = out.transpose(1, 2)
    return (out, lse.transpose(1, 2)) if return_lse else out
