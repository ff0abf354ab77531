"""Which blocks a mask or segments let meet: never one pair too few, and no more than blocks can say."""

from __future__ import annotations

import re

import pytest
import torch
import torch._dynamo.testing
from extra_cases import packed, padding, segments

from flash_inductor.functional import attention
from flash_inductor.ops import block_ranges
from flash_inductor.ops.ranges import RANGE_BLOCK

CASES = {
    # name: (mask, query segments, key segments, query length, key length)
    "right padding": (padding([200, 300, 0], 300), None, None, 290, 300),
    "left padding": (padding([200, 300, 1], 300, left=True), None, None, 100, 300),
    "holes": (torch.rand(2, 1, 1, 500, generator=torch.Generator().manual_seed(0)) > 0.995, None, None, 400, 500),
    "documents": (None, packed(600, 200), packed(600, 200), 600, 600),
    "chunks of a block": (None, packed(512, RANGE_BLOCK), packed(512, RANGE_BLOCK), 512, 512),
    "documents and padding": (padding([250, 600], 600), packed(600, 200), packed(600, 200), 600, 600),
    "own documents": (None, segments(1, 300).sort().values, segments(2, 400).sort().values, 300, 400),
    "scattered": (None, segments(1, 300), segments(2, 400), 300, 400),
    "nothing in common": (None, packed(300, 10), packed(300, 10) + 100, 300, 300),
    "an opaque mask": (torch.zeros(1, 1, 200, 300).bool(), None, None, 200, 300),
    "short": (padding([3], 5), None, None, 4, 5),
    "no keys": (torch.zeros(2, 1, 1, 0).bool(), None, None, 4, 0),
}


def seen_of(mask, query_segments, key_segments, q_len, kv_len):
    seen = torch.ones(1, q_len, kv_len, dtype=torch.bool)
    if mask is not None:
        seen = seen & mask[:, 0]
    if query_segments is not None:
        seen = seen & (query_segments[:, :, None] == key_segments[:, None])
    return seen


@pytest.mark.parametrize("name", CASES)
def test_nothing_visible_lies_outside(name):
    arguments = CASES[name]
    key_range, query_range = block_ranges(*arguments)
    seen = seen_of(*arguments)
    for ranges, pairs in ((key_range, seen), (query_range, seen.mT)):
        batch, rows, columns = pairs.shape
        assert ranges.dtype == torch.int32
        assert ranges.shape == (ranges.shape[0], -(-rows // RANGE_BLOCK), 2) and ranges.shape[0] in (1, batch)
        assert (ranges[..., 0] <= ranges[..., 1]).all() and (ranges >= 0).all() and (ranges <= columns).all()
        for b in range(batch):
            for t, (start, stop) in enumerate(ranges[b % ranges.shape[0]].tolist()):
                block = pairs[b, t * RANGE_BLOCK : (t + 1) * RANGE_BLOCK]
                assert not block[:, :start].any() and not block[:, stop:].any()


def test_ranges_are_tight():
    key_range, query_range = block_ranges(padding([200, 300, 0], 300), None, None, 290, 300)
    assert key_range.tolist() == [[[0, 200]] * 3, [[0, 300]] * 3, [[0, 0]] * 3]
    assert query_range.tolist() == [[[0, 290]] * 2 + [[0, 0]], [[0, 290]] * 3, [[0, 0]] * 3]
    assert key_range.stride(1) == 0
    chunks = packed(512, RANGE_BLOCK)
    for ranges in block_ranges(None, chunks, chunks, 512, 512):
        assert ranges.tolist() == [[[i * 128, i * 128 + 128] for i in range(4)]]
    opaque = block_ranges(*CASES["an opaque mask"])
    assert [x.tolist() for x in opaque] == [[[[0, 300]] * 2], [[[0, 200]] * 3]]
    assert opaque[0].stride(1) == opaque[1].stride(1) == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_ranges_are_the_same(dynamic):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    @torch.compile(backend=counter, fullgraph=True, dynamic=dynamic)
    def function(mask, ids, kv_ids):
        return block_ranges(mask, ids, kv_ids, ids.shape[1], kv_ids.shape[1])

    # A length of one block is compiled anew, as a size of 1 always is.
    for length in (300, 410, 200) if dynamic else (300,):
        arguments = padding([length // 3, length], length), segments(1, length - 20), packed(length, 100)
        got = function(*arguments)
        want = block_ranges(*arguments, length - 20, length)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((None, None, None, 5, 5), ValueError, "block_ranges: expected a mask or segments, got neither"),
        ((torch.ones(2, 5).bool(), None, None, 5, 5), ValueError, "mask: expected 4 dims, got shape [2, 5]"),
        ((torch.ones(2, 1, 1, 5), None, None, 5, 5), TypeError, "mask: expected torch.bool, got torch.float32"),
        ((None, packed(4, 2), packed(5, 2), 5, 5), ValueError, "query_segments: expected a last dim of 5, got [1, 4]"),
        ((None, packed(5, 2).long(), None, 5, 5), TypeError, "query_segments: expected torch.int32, got torch.int64"),
    ],
)
def test_errors(arguments, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        block_ranges(*arguments)


@pytest.mark.parametrize("name", ["left padding", "documents and padding", "an opaque mask"])
def test_opcheck(name):
    torch.library.opcheck(block_ranges, CASES[name])


def test_export():
    """A model that computes its ranges and attends within them, for any length."""

    class Module(torch.nn.Module):
        def forward(self, query, mask):
            return attention(query, query, query, mask=mask[:, None, None, :], is_causal=True)

    def inputs(length):
        return torch.randn(2, 2, length, 8), torch.arange(length).expand(2, -1) < length // 2

    length = torch.export.Dim("length", min=130, max=1000)
    program = torch.export.export(Module(), inputs(300), dynamic_shapes=({2: length}, {1: length}))
    for n in (200, 700):
        given = inputs(n)
        torch.testing.assert_close(program.module()(*given), Module()(*given))
