"""Masks of Transformers stay what they are: dense again they equal its own, for every way it makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import masking_utils as m

from flash_inductor.integrations.mask_structure import MaskStructure
from flash_inductor.integrations.mask_terms import BATCH, NotStructured, Position, _Other, terms_of
from flash_inductor.integrations.transformers_masks import attention_mask

LENGTHS = {"square": (9, 9, 0, 0), "prefill": (4, 9, 5, 0), "sliding": (3, 6, 7, 4), "static": (4, 12, 0, 0)}
LEFT = torch.tensor([0, 3])

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal": m.causal_mask_function,
    "full": m.bidirectional_mask_function,
    "window": m.sliding_window_causal_mask_function(4),
    "both sides": m.sliding_window_bidirectional_mask_function(2),
    "chunks": m.chunked_causal_mask_function(4, LEFT),
}


def both(
    function: Callable[..., Any], sizes: tuple[Any, ...], padding: Any = None
) -> tuple[MaskStructure, torch.Tensor]:
    q_length, kv_length, q_offset, kv_offset = sizes
    arguments = {
        "batch_size": 2, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset,
        "mask_function": function, "attention_mask": padding,
    }  # fmt: skip
    return attention_mask(**arguments), m.sdpa_mask(**arguments, allow_is_causal_skip=False)


def padding_of(kind: str, sizes: tuple[int, ...]) -> torch.Tensor | None:
    """bool [2, tokens so far], as a tokenizer pads."""
    if kind == "none":
        return None
    real = torch.ones(2, sizes[0] + sizes[2], dtype=torch.bool)
    real[1, slice(-2, None) if kind == "right" else slice(0, 3)] = False
    return real if kind != "all real" else torch.ones_like(real)


@pytest.mark.parametrize("kind", ["none", "all real", "right", "left"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_structure_equals_the_dense_mask(name: str, lengths: str, kind: str) -> None:
    padding = padding_of(kind, LENGTHS[lengths])
    ours, theirs = both(FUNCTIONS[name], LENGTHS[lengths], padding)
    assert torch.equal(ours.dense(), theirs)
    assert ours.opaque is None
    if kind in ("none", "all real") and not (
        lengths == "static" and kind == "all real" and name in ("full", "both sides")
    ):
        assert ours.keys is None


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["causal", "window", "chunks"])
def test_static_cache(name: str, padded: bool) -> None:
    """The position is a tensor: of one query the band is a set of keys, else it is read."""
    padding = padding_of("left", (1, 0, 7, 0)) if padded else None
    ours, theirs = both(FUNCTIONS[name], (1, 12, torch.tensor(7), 0), padding)
    assert torch.equal(ours.dense(), theirs)
    assert ours.opaque is None and ours.upper is None and ours.keys is not None
    ours, theirs = both(FUNCTIONS[name], (3, 12, torch.tensor(7), 0), None)
    assert torch.equal(ours.dense(), theirs)
    assert ours.opaque is None and ours.keys is None


def packed(positions: torch.Tensor, inner: Callable[..., Any]) -> Callable[..., Any]:
    segments = m.find_packed_sequence_indices(positions)
    return m.and_masks(
        m.remap_positions_for_packed_sequence(inner, positions), m.packed_sequence_mask_function(segments)
    )


POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1], [4, 5, 6, 7, 8, 0, 1, 2, 3]])


@pytest.mark.parametrize("name", ["causal", "window"])
def test_packed_documents(name: str) -> None:
    ours, theirs = both(packed(POSITIONS, FUNCTIONS[name]), LENGTHS["square"])
    assert torch.equal(ours.dense(), theirs)
    assert ours.opaque is None and ours.query_segments is not None and ours.upper == 0


@pytest.mark.parametrize(
    "function",
    [
        packed(POSITIONS, m.chunked_causal_mask_function(2, torch.zeros(2, dtype=int))),
        m.or_masks(m.causal_mask_function, m.blockwise_overlay(torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1]] * 2))),
        m.and_masks(m.causal_mask_function, lambda b, h, q, k: (q + k) % 3 > 0),
        m.and_masks(m.causal_mask_function, lambda b, h, q, k: k != 2),
        m.and_masks(m.causal_mask_function, lambda b, h, q, k: ~(k > q - 2)),
        m.and_masks(m.causal_mask_function, m.sliding_window_overlay(torch.tensor(3))),
        # distances of positions that jump inside a segment are not those of indices
        m.and_masks(
            m.remap_positions_for_packed_sequence(m.sliding_window_causal_mask_function(3), 2 * POSITIONS),
            m.packed_sequence_mask_function(m.find_packed_sequence_indices(POSITIONS)),
        ),
        m.remap_positions_for_packed_sequence(m.causal_mask_function, POSITIONS),
    ],
    ids=["packed chunks", "blocks", "sum", "one key", "negation", "tensor window", "jumps", "no segments"],
)
def test_what_is_no_structure_stays_dense(function: Callable[..., Any]) -> None:
    ours, theirs = both(function, LENGTHS["square"], padding_of("right", LENGTHS["square"]))
    assert torch.equal(ours.dense(), theirs)
    assert ours.opaque is not None


def test_functions_of_the_user_are_not_run_with_symbols() -> None:
    def function(b: Any, h: Any, q: Any, k: Any) -> Any:
        assert isinstance(q, torch.Tensor)
        return k <= q

    ours = attention_mask(1, 4, 4, mask_function=function, use_vmap=True)
    assert torch.equal(ours.dense(), torch.ones(4, 4).tril().bool()[None, None])


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: q,
        lambda b, h, q, k: q < 3,
        lambda b, h, q, k: q >= 1,
        lambda b, h, q, k: q // 2 - 1 == k,
        lambda b, h, q, k: q // 0 == k // 0,
        lambda b, h, q, k: q == q,
        lambda b, h, q, k: h == q,
        lambda b, h, q, k: abs(q - k) <= torch.tensor(1),
        lambda b, h, q, k: torch.ones(3)[q],
        lambda b, h, q, k: torch.ones(3, 3)[q, k],
        lambda b, h, q, k: torch.ones(3, 3)[b, k] == torch.ones(3, 3)[b, q],
        lambda b, h, q, k: torch.ones(3, 3, dtype=torch.bool)[b, q],
        lambda b, h, q, k: torch.ones(3, 3, dtype=torch.int)[b, k + 1] == torch.ones(3, 3, dtype=torch.int)[b, q],
        lambda b, h, q, k: (k <= q) & torch.ones(3, 3),
        lambda b, h, q, k: (k <= q) ^ (k <= q),
        lambda b, h, q, k: q.shape[0] > k,
        lambda b, h, q, k: (k <= q) and (q - 3 <= k),
        lambda b, h, q, k: not (k <= q),
        lambda b, h, q, k: k <= q if q - k else k >= q,
        lambda b, h, q, k: k <= q if h else k >= q,
    ],
)
def test_what_symbols_do_not_express(function: Callable[..., Any]) -> None:
    with pytest.raises(NotStructured):
        terms_of(function)


def test_symbols_are_exact() -> None:
    terms = terms_of(lambda b, h, q, k: (k < q + 3) & (q - 5 < k) & (q >= 0))
    assert (terms.lower, terms.upper) == (-4, 2)
    terms = terms_of(lambda b, h, q, k: abs(k - q) < 3)
    assert (terms.lower, terms.upper) == (-2, 2)
    assert isinstance(Position("query") - 1, Position) and _Other(BATCH).axis == BATCH


def test_code_that_works_on_masks_gets_an_error() -> None:
    mask = attention_mask(2, 4, 6, q_offset=2)
    assert mask[:, :, :, :6] is mask and mask[:, :, :, :7] is mask
    assert mask.shape == (2, 1, 4, 6) and mask.ndim == 4
    for index in ((slice(None), slice(None), slice(None), slice(0, 5)), 0, (..., slice(0, 6)), (slice(1, None),)):
        with pytest.raises(TypeError, match="enable"):
            mask[index]
    with pytest.raises(TypeError):
        torch.zeros(2, 1, 4, 6) + mask
    with pytest.raises(TypeError, match="dtype"):
        mask.to(torch.float32)
    assert torch.equal(mask.to("cpu").dense(), mask.dense())


def test_what_hides_nothing_is_known() -> None:
    assert attention_mask(2, 1, 9, q_offset=8).is_full()
    assert attention_mask(2, 3, 9, mask_function=m.bidirectional_mask_function).is_full()
    assert not attention_mask(2, 2, 9, q_offset=7).is_full()
    assert not attention_mask(2, 1, 9, q_offset=7).is_full()
    assert not attention_mask(2, 1, 9, q_offset=8, mask_function=FUNCTIONS["window"]).is_full()
    assert not attention_mask(2, 1, 9, q_offset=8, attention_mask=padding_of("left", (1, 9, 8, 0))).is_full()
