"""Layers that share a mask: it is proved once, but each layer gets what the mask means where that layer uses it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from site_helpers import compile_and_compare, qkv

from flash_inductor.matching import mask_interpreter, masks
from flash_inductor.spec import MaskSpec


def columns_and_rows(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(n)
    return at[None, :], at[:, None]


def three_layers(q, k, v, use: Callable[[torch.Tensor, int], torch.Tensor]):
    columns, rows = columns_and_rows(q.shape[2])
    mask = (columns <= rows) & (columns > rows - 5)
    for layer in range(3):
        q = F.scaled_dot_product_attention(q, k, v, attn_mask=use(mask, layer))
    return q


USES = {
    "the same node": (lambda mask, layer: mask, 1),
    "a view of its own": (lambda mask, layer: mask[None, None], 3),
    "inverted twice": (lambda mask, layer: ~(~mask), 3),
}


@pytest.mark.parametrize("name", USES)
def test_a_shared_mask_is_made_out_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use, proofs = USES[name]
    proved, evaluated = [], []
    prove, evaluate = masks.prove, mask_interpreter.Interpreter._evaluate
    monkeypatch.setattr(masks, "prove", lambda *args: proved.append(args) or prove(*args))
    monkeypatch.setattr(
        mask_interpreter.Interpreter, "_evaluate", lambda self, node: evaluated.append(node) or evaluate(self, node)
    )
    done = compile_and_compare(lambda q, k, v: three_layers(q, k, v, use), qkv())
    assert [site.spec.mask for site in done.sites] == [MaskSpec(-4, 0)] * 3
    assert len(proved) == proofs
    calls = [node for node in evaluated if node.op in ("call_function", "call_method")]
    assert len(calls) == len(set(calls))


def test_a_mask_that_is_written_between_layers() -> None:
    def fn(q, k, v):
        columns, rows = columns_and_rows(q.shape[2])
        mask = columns <= rows
        q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None])
        mask.logical_and_(columns > rows - 3)
        q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mask.fill_(True)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None])

    done = compile_and_compare(fn, qkv())
    bands = [MaskSpec(None, 0), MaskSpec(None, 0), MaskSpec(-2, 0), MaskSpec()]
    assert [site.spec.mask for site in done.sites] == bands


class TwoLayers(torch.nn.Module):
    """A buffer, used by both layers as a view of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(12, 12, dtype=torch.bool).tril())

    def forward(self, q, k, v):
        for _ in range(2):
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=self.seen[None, None])
        return q


def test_a_shared_buffer_stays_guarded() -> None:
    model = TwoLayers()
    done = compile_and_compare(model, qkv())
    assert [site.spec.mask for site in done.sites] == [MaskSpec(None, 0)] * 2
    args = qkv()
    compiled = torch.compile(model, backend=done)
    compiled(*args)
    model.seen.fill_(True)
    torch.testing.assert_close(compiled(*args), model(*args))


@pytest.mark.parametrize("length", [12, 16])
def test_shared_by_tables_of_other_sizes(length: int) -> None:
    """One mask node, broadcast over two tables: the proof is of a mask over a table."""

    def fn(q, k, v, wide_k, wide_v):
        mask = (torch.arange(q.shape[2]) >= 2)[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask), F.scaled_dot_product_attention(
            q, wide_k, wide_v, attn_mask=mask
        )

    q, k, v = qkv()
    compile_and_compare(fn, (q, k, v, *qkv(q_len=12, kv_len=length)[1:]))
