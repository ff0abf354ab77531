"""Transformers' mask interface: what its mask functions and padding masks mean, as :class:`MaskStructure`."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from .mask_structure import MaskStructure
from .mask_terms import NotStructured, Position, Terms, terms_of

Int = Any  # int | torch.SymInt


def attention_mask(
    batch_size: Int,
    q_length: Int,
    kv_length: Int,
    q_offset: Int | Tensor = 0,
    kv_offset: Int | Tensor = 0,
    mask_function: Any = None,
    attention_mask: Any = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> MaskStructure:
    """What ``mask_function`` and the padding mask let each query see; never None, so that no default is left to guess.

    Args:
        batch_size, q_length, kv_length: sizes of the scores.
        q_offset, kv_offset: position of the first query and of the first key; tensors for static caches.
        mask_function: visible(batch, head, query position, key position); causal if None.
        attention_mask: bool [batch, number of tokens], True for real ones; those it lacks on the right are no keys.
        use_vmap: the function is a user's and may not be one of indices.
        device: where the attention is.
        kwargs: what other implementations need.
    """
    if isinstance(attention_mask, MaskStructure):
        return attention_mask  # made before, as generate does
    if mask_function is None:
        from transformers.masking_utils import causal_mask_function

        mask_function = causal_mask_function
    sizes = {"batch": batch_size, "q_length": q_length, "kv_length": kv_length, "device": device}
    try:
        if use_vmap:
            raise NotStructured("a mask function of the user's")
        return _structure(terms_of(mask_function), sizes, q_offset, kv_offset, attention_mask)
    except NotStructured:
        return _opaque(sizes, q_offset, kv_offset, mask_function, attention_mask, use_vmap)


def _structure(
    terms: Terms, sizes: dict[str, Any], q_offset: Any, kv_offset: Any, padding: Tensor | None
) -> MaskStructure:
    """``terms`` are about positions, a band is about indices: key - query index = distance + q_offset - kv_offset."""
    q_length, kv_length = sizes["q_length"], sizes["kv_length"]
    q_offset = _as_number(q_offset, q_length)
    if isinstance(kv_offset, Tensor) or (isinstance(q_offset, Tensor) and not is_one(q_length)):
        raise NotStructured("positions that are tensors")
    if terms.remapped is not None:
        _check_packed(terms)
    keys = [_tokens(x, kv_offset, kv_length) for x in (*terms.keys, *([] if padding is None else [padding]))]
    lower, upper = terms.lower, terms.upper
    if isinstance(q_offset, Tensor):  # one query, at a position that only the device knows: its band is a set of keys
        distance = torch.arange(kv_length, device=sizes["device"])[None] + kv_offset - q_offset
        keys += [distance >= lower] if lower is not None else []
        keys += [distance <= upper] if upper is not None else []
        lower = upper = None
    else:
        lower = None if lower is None else lower + q_offset - kv_offset
        upper = None if upper is None else upper + q_offset - kv_offset
    query_segments, key_segments = _segments(terms, sizes, q_offset, kv_offset)
    seen = reduce(torch.logical_and, keys) if keys else None
    if seen is not None and not _is_tracing(seen) and _hides_nothing(seen, upper, q_length):
        seen = None
    return MaskStructure(
        **sizes, lower=lower, upper=upper, keys=seen, query_segments=query_segments, key_segments=key_segments
    )


def _as_number(offset: Int | Tensor, q_length: Int) -> Int | Tensor:
    """The position of the first query as a number, unless it is a tensor that had better not be read."""
    if not isinstance(offset, Tensor) or is_one(q_length) or _is_tracing(offset):
        return offset  # a decoding step doesn't wait for the device
    return int(offset)


def is_one(size: Int) -> bool:
    """Whether a size is 1, without asking a symbol: it is none of 0 and 1 unless somebody guarded on it."""
    return isinstance(size, int) and size == 1


def _is_tracing(tensor: Tensor) -> bool:
    from transformers.utils.import_utils import is_tracing

    return is_tracing(tensor)


def _tokens(real: Tensor, kv_offset: Int, kv_length: Int) -> Tensor:
    """The part of a padding mask that is about the keys at hand; tokens it doesn't know are no keys."""
    if real.dim() != 2:
        raise NotStructured(f"a padding mask of shape {list(real.shape)}")
    # A negative number of tokens to add is one to cut off.
    return nn.functional.pad(real.bool(), (0, kv_offset + kv_length - real.shape[1]))[:, kv_offset:]


def _hides_nothing(seen: Tensor, upper: Int | None, q_length: Int) -> bool:
    """Whether all keys that the band lets anybody see are real.  Transformers' own masks read them here as well."""
    visible = seen if upper is None else seen[:, : max(0, upper + q_length)]
    return bool(visible.all())


def _check_packed(terms: Terms) -> None:
    """Distances of positions that start again are those of indices, within a segment of consecutive positions.

    Transformers makes the segments from the positions (find_packed_sequence_indices), so this holds; where values can
    be read it is checked.
    """
    positions = terms.remapped
    segments = next((q.values for q, k in terms.segments if q.is_plain() and q.values is k.values), None)
    if positions is None or segments is None:
        raise NotStructured("positions without the segments that they count in")
    if not _is_tracing(positions):
        steps = segments.diff(dim=-1)
        if bool((steps < 0).any() | ((positions.diff(dim=-1) != 1) & (steps == 0)).any()):
            raise NotStructured("positions that don't count up within a segment")


def _segments(
    terms: Terms, sizes: dict[str, Any], q_offset: Any, kv_offset: Any
) -> tuple[Tensor | None, Tensor | None]:
    """int32 [batch or 1, length] of queries and keys."""
    if not terms.segments:
        return None, None
    if len(terms.segments) > 1:
        raise NotStructured("two kinds of segments")
    query, key = terms.segments[0]
    return (
        _numbers(query, sizes["q_length"], q_offset, sizes["device"]).to(torch.int32),
        _numbers(key, sizes["kv_length"], kv_offset, sizes["device"]).to(torch.int32),
    )


def _numbers(position: Position, length: Int, offset: Any, device: torch.device | str) -> Tensor:
    """The values of a symbol, [batch or 1, length]."""
    numbers = position.values
    if numbers is None:
        numbers = (torch.arange(length, device=device) + offset)[None]
    elif not (isinstance(offset, int) and offset == 0) or numbers.shape[1] != length:
        raise NotStructured("positions of other tokens than those at hand")
    numbers = numbers + position.offset
    for values in position.per_batch:
        numbers = numbers - values[:, None]
    return numbers if position.divisor is None else numbers.div(position.divisor, rounding_mode="floor")


def _opaque(
    sizes: dict[str, Any], q_offset: Any, kv_offset: Any, mask_function: Any, padding: Tensor | None, use_vmap: bool
) -> MaskStructure:
    """The mask as transformers makes it for SDPA."""
    from transformers.masking_utils import sdpa_mask

    seen = sdpa_mask(
        batch_size=sizes["batch"],
        q_length=sizes["q_length"],
        kv_length=sizes["kv_length"],
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=padding,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=sizes["device"],
    )
    return MaskStructure(**sizes, opaque=seen)
