"""Transformers: ``attn_implementation="flash_inductor"``, with and without torch.compile.

    import flash_inductor
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flash_inductor")

Importing flash_inductor is enough, before or after transformers; :func:`register` does it by hand.  Masks reach the
kernels as what they are: causal, windows, chunks, padding, packed documents.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import attention
from ..spec import AttentionSpec
from ..support import unsupported_reasons
from .mask_structure import MaskStructure
from .transformers_masks import attention_mask, is_one

NAME = "flash_inductor"
_PLAIN = AttentionSpec()  # made once: Dynamo can't
Int = Any  # int | torch.SymInt


def register() -> None:
    """Make ``attn_implementation="flash_inductor"`` known to transformers; may be called again.

    Raises ImportError if transformers isn't installed, or is older than its attention and mask interfaces.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    _tell_apart_from_flash_attention()


def _tell_apart_from_flash_attention() -> None:
    """Transformers takes any name with "flash" in it for one of the FlashAttention packages.

    It would look for such a package, give models that name the packages they work with (gpt-oss) another one, and
    refuse what those packages can't do, such as chunks.
    """
    from transformers.utils import generic

    original: Any = getattr(generic, "is_flash_attention_requested", None)
    if original is None or hasattr(original, "without_flash_inductor"):
        return

    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, *args: Any, **kwargs: Any
    ) -> bool:
        if NAME in (requested_attention_implementation, getattr(config, "_attn_implementation", None)):
            return False
        return original(config, requested_attention_implementation, *args, **kwargs)

    is_flash_attention_requested.without_flash_inductor = original  # type: ignore[attr-defined]
    # Modules imported from now on find the new one in ``generic``; those that have the old one by name are told.
    name = original.__name__
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("transformers.") and vars(module).get(name) is original:
            setattr(module, name, is_flash_attention_requested)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention interface.

    Args:
        module: asked for ``is_causal`` where neither a mask nor the argument says it.
        query, key, value: [B, H, N, D], [B, Hk, M, D], [B, Hk, M, Dv].
        attention_mask: what :func:`attention_mask` made; or a tensor [B or 1, H or 1, N, at least M], bool (True =
            seen) or added to the scores; or None.
        dropout: probability of dropping a probability, 0 in evaluation.
        scaling: of the scores; 1 / sqrt(D) if None.
        is_causal: used only without a mask: nothing to the right is seen.
        softcap: cap * tanh(scores / cap) before the mask.
        s_aux: [H], attention sinks.
        position_bias: [B or 1, H or 1, N, M], added to the scores.
        kwargs: what other implementations need.

    Returns:
        [B, N, H, Dv], contiguous, and None for the weights.

    Where no kernel takes the inputs (a device, dtype or head dim), transformers' SDPA does with one warning; so it does
    for one query on a GPU, since it splits the keys.

    Raises:
        ValueError: a mask that doesn't fit, or weights or a head mask are asked for.
        NotImplementedError: a paged cache; softcap or sinks where no kernel takes the inputs.
    """
    _refuse_ignored(module, attention_mask, query.shape[2], is_causal, kwargs)
    reasons = unsupported_reasons(_PLAIN, query.shape, key.shape, value.shape, str(query.dtype)[6:], query.device.type)
    capped_or_sunk = softcap is not None or s_aux is not None
    if reasons and capped_or_sunk:
        raise NotImplementedError(f"attention with a softcap or sinks: {' '.join(reasons)}")
    decoding = is_one(query.shape[2]) and query.device.type == "cuda" and position_bias is None
    if reasons or (decoding and not capped_or_sunk):
        if reasons:
            _warn_once(f"attention is left to transformers' SDPA: {' '.join(reasons)}")
        return _sdpa(module, query, key, value, attention_mask, dropout, scaling, is_causal, position_bias, kwargs)
    operands = _operands(module, attention_mask, query.shape[2], key.shape[2], is_causal)
    if position_bias is not None:
        bias = operands.get("bias")
        operands["bias"] = position_bias if bias is None else position_bias + bias
    out = attention(query, key, value, scale=scaling, softcap=softcap, sinks=s_aux, dropout_p=dropout, **operands)
    return out.transpose(1, 2).contiguous(), None


def _operands(module: nn.Module, mask: Any, q_length: Int, kv_length: Int, is_causal: bool | None) -> dict[str, Any]:
    """The mask as keyword arguments of :func:`flash_inductor.attention`."""
    if isinstance(mask, MaskStructure):
        for name, expected, got in (("queries", mask.q_length, q_length), ("keys", mask.kv_length, kv_length)):
            if expected != got:
                raise ValueError(f"attention_mask: made for {expected} {name}, got {got}")
        return mask.operands()
    if mask is None:
        causal = module.is_causal if is_causal is None and not is_one(q_length) else is_causal
        return {"is_causal": bool(causal) and not is_one(q_length)}
    mask = mask[..., :kv_length]
    return {"mask" if mask.dtype is torch.bool else "bias": mask}


def _refuse_ignored(
    module: nn.Module, mask: Any, q_length: Int, is_causal: bool | None, kwargs: dict[str, Any]
) -> None:
    """Raise for what would change the result and isn't looked at; some of it transformers' SDPA drops silently."""
    if kwargs.get("output_attentions"):
        raise ValueError('output_attentions: the weights are never made; use attn_implementation="eager" for them')
    if kwargs.get("head_mask") is not None:
        raise ValueError('head_mask: not supported; use attn_implementation="eager"')
    if kwargs.get("block_table") is not None:
        raise NotImplementedError('a paged cache: not supported; use attn_implementation="sdpa"')
    if isinstance(mask, MaskStructure):
        return
    if mask is None:
        if kwargs.get("cu_seq_lens_q") is not None:
            raise ValueError("cu_seq_lens_q: expected a mask too; pass position_ids, which say the same")
        if is_causal is None and not hasattr(module, "is_causal") and not is_one(q_length):
            raise ValueError(f"is_causal: neither an argument, a mask nor an attribute of {type(module).__name__}")
    elif not isinstance(mask, Tensor) or mask.dim() != 4:
        got = f"shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask: expected None, a tensor with 4 dims or flash_inductor's mask, got {got}")


def _sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    position_bias: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if isinstance(mask, MaskStructure):
        is_causal = False
        mask = None if mask.is_full() else mask.dense()  # a mask of nothing would keep SDPA from its fast kernels
    if position_bias is not None:
        kwargs["position_bias"] = position_bias
    return sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )


def _warn_once(message: str) -> None:
    from transformers.utils.logging import get_logger

    get_logger("transformers.integrations.flash_inductor").warning_once(message)
