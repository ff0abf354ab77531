"""Twins of the forms in test_operands.py: with one change each, which makes them something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from pattern_inputs import minus
from site_helpers import capture, compile_and_compare, qkv
from test_operands import B, D, H, N, anything, attend, columns, hf, learned, padding, ragged, rows
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_inductor.matching import emit_operands
from flash_inductor.matching.rewrite import rewrite_graph

# name: (function, arguments, whether it is replaced, words of the report or of the reason)
TWINS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], bool, str]] = {}


def twin(words: str, *more: Any, replaced: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        TWINS[fn.__name__] = (fn, (*qkv(H, q_len=N, dim=D, batch=B), *more), replaced, words)
        return fn

    return add


# --- left alone


@twin("tanh", learned(N, N), replaced=False)
def bias_before_softcap(q, k, v, bias):
    return attend(5 * torch.tanh((q @ k.mT + bias) / 5), v)


@twin("written to in place", padding(), replaced=False)
def mask_written_after(q, k, v, pad):
    m = pad.bool()[:, None, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=m)
    m.logical_not_()
    return out, m.float()


@twin("written to in place", learned(1, H, N, N).detach(), replaced=False)
def bias_written_after(q, k, v, bias):
    bias = bias.exp()
    out = attend(q @ k.mT + bias, v)
    bias.zero_()
    return out, bias


@twin("before the attention sink", torch.randn(H), replaced=False)
def sinks_next_to_shifted_scores(q, k, v, sinks):
    s = torch.cat([q @ k.mT + 3.0, sinks.view(1, H, 1, 1).expand(B, H, N, 1)], -1)
    return torch.softmax(s, -1)[..., :-1] @ v


@twin("also used", replaced=False)
def scores_below_a_threshold(q, k, v):
    s = q @ k.mT
    return attend(s.masked_fill(s < s.mean(-1, keepdim=True), -1e9), v)


@twin("also used", replaced=False)
def scores_added_to_themselves(q, k, v):
    s = q @ k.mT
    return attend(s + s.softmax(-1), v)


@twin("does not hide", anything(B, 1), replaced=False)
def mild_fill(q, k, v, m):
    return attend((q @ k.mT).masked_fill(~m, -5.0), v)


@twin("a row of the mask", replaced=False)
def rows_that_get_the_mean(q, k, v):
    return attend(q @ k.mT + (columns() > rows() - 3).float() * -1e9, v)


@twin("a row of the mask", replaced=False)
def rows_of_an_odd_mask_that_get_the_mean(q, k, v):
    hidden = (columns() > rows() - 3) | (columns() == 1)
    return attend((q @ k.mT).masked_fill(hidden, -1e9), v)


@twin("hides everything", replaced=False)
def nothing_is_seen(q, k, v):
    return attend((q @ k.mT).masked_fill(torch.ones(N, N, dtype=torch.bool), -1e9), v)


# --- replaced, but by what they are


@twin("mask", padding(), replaced=True)
def padding_changed_after_it_was_read(q, k, v, pad):
    m = pad.bool()
    both = m[:, None, None] & (columns() <= rows())
    m.zero_()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=both)


@twin("mask", padding(), replaced=True)
def padding_changed_through_a_view(q, k, v, pad):
    m = pad.bool()
    flat = m.view(-1)
    both = m[:, None, None] & (columns() <= rows())
    flat.zero_()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=both)


@twin("padding", padding(), replaced=True)
def padding_changed_before_it_is_read(q, k, v, pad):
    m = pad.bool()
    m[0, 3] = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m[:, None, None] & (columns() <= rows()))


@twin("mask", padding().flip(1), replaced=True)
def padding_of_queries(q, k, v, pad):
    seen = pad.bool()[:, None, :, None] & (columns() <= rows())
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


@twin("padding", padding(), replaced=True)
def padding_the_other_way_round(q, k, v, pad):
    return attend((q @ k.mT).masked_fill(pad.flip(1)[:, None, None] == 0, -1e9), v)


@twin("padding", torch.cat([padding(), padding()], 1), replaced=True)
def padding_from_the_third_on(q, k, v, pad):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=pad.bool()[:, None, None, 2 : N + 2])


@twin("padding", torch.cat([padding(), padding()], 1), replaced=True)
def every_second_padding(q, k, v, pad):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=pad.bool()[:, None, None, ::2])


@twin("padding", padding(), torch.tensor([1, 0]), replaced=True)
def padding_of_another_batch_entry(q, k, v, pad, order):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=pad.bool()[order][:, None, None])


@twin("mask", padding(), replaced=True)
def padding_or_causal(q, k, v, pad):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=pad.bool()[:, None, None] | (columns() <= rows()))


@twin("bias", torch.linspace(0, 3, B * N).view(B, N), replaced=True)
def one_minus_what_is_no_mask(q, k, v, weights):
    return attend(q @ k.mT + (1.0 - weights[:, None, None]) * 0.5, v)


@twin("bias", padding(), replaced=True)
def integers_are_added(q, k, v, pad):
    return attend(q @ k.mT * 0.25 + pad[:, None, None], v)


@twin("mask", ragged().int(), replaced=True)
def neighbouring_segments(q, k, v, ids):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=ids[:, None, :, None] <= ids[:, None, None] + 1)


@twin("mask", 2 * ragged(), replaced=True)
def steps_of_two(q, k, v, pos):
    bi = torch.arange(B)[:, None, None, None]
    i, j = torch.arange(N)[None, None, :, None], torch.arange(N)[None, None, None, :]
    segments = (torch.diff(pos, prepend=pos[:, :1] - 2, dim=-1) != 2).cumsum(-1)
    m = (pos[bi, j] <= pos[bi, i]) & (segments[bi, i] == segments[bi, j])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m)


@twin("mask", ragged(), ragged().flip(0), replaced=True)
def positions_of_others(q, k, v, pos, others):
    bi = torch.arange(B)[:, None, None, None]
    i, j = torch.arange(N)[None, None, :, None], torch.arange(N)[None, None, None, :]
    segments = (torch.diff(others, prepend=others[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    m = (pos[bi, j] <= pos[bi, i]) & (segments[bi, i] == segments[bi, j])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m)


@twin("mask", ragged(), replaced=True)
def positions_without_segments(q, k, v, pos):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=pos[:, None, None] <= pos[:, None, :, None])


@twin("bias", learned(1, H, N, N), replaced=True)
def bias_without_gradient(q, k, v, bias):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.detach())


@twin("bias", learned(1, H, N, N), replaced=True)
def bias_read_without_gradient(q, k, v, bias):
    with torch.no_grad():
        view = bias[:, :].transpose(-1, -2)  # its metadata still says that it requires a gradient
    return attend(q @ k.mT + view + minus(N), v)


@twin("bias", learned(1, H, N, N), anything(B, 1), replaced=True)
def bias_where_seen(q, k, v, bias, m):
    return attend(q @ k.mT + torch.where(m, bias, -1e9), v)


@twin("bias", learned(1, H, N, N), learned(1, 1, N, N), anything(B, 1), replaced=True)
def one_bias_or_another(q, k, v, a, b, m):
    return attend(q @ k.mT + torch.where(m, a, b), v)


@pytest.mark.parametrize("name", TWINS)
def test_is_equal_and_what_it_is(name: str) -> None:
    fn, args, replaced, words = TWINS[name]
    backend = compile_and_compare(fn, args, exact=not replaced)
    (site,) = backend.sites
    assert site.replaced == replaced, site.reason
    if site.replaced:
        assert site.spec is not None and words in site.spec.extras
    else:
        assert words in (site.reason or "")
        assert not any("flashbwd" in str(n.target) for gm in backend.graphs for n in gm.graph.nodes)


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (H, D)).transpose(1, 2)


def dynamic_cases() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]]:
    def keys_and_causal(q, k, v, pad):
        i, j = torch.arange(q.shape[1])[:, None], torch.arange(q.shape[1])[None]
        m = (j <= i) & pad[:, None, None].bool()
        return F.scaled_dot_product_attention(*map(heads, (q, k, v)), attn_mask=m)

    def float_mask(q, k, v, pad):
        added = torch.where(pad[:, None, None].bool(), 0.0, torch.finfo(q.dtype).min)
        return attend(heads(q) @ heads(k).mT + added, heads(v))

    def flattened(q, k, v, pad):
        b, n = q.shape[:2]
        q, k, v = (heads(x).reshape(b * H, n, D) for x in (q, k, v))
        scores = (q @ k.mT).view(b, H, n, n).masked_fill(pad[:, None, None] == 0, -1e9)
        return torch.softmax(scores.view(b * H, n, n), -1) @ v

    def chunked(q, k, v, pad):
        i, j = torch.arange(q.shape[1])[:, None], torch.arange(q.shape[1])[None]
        return attend((heads(q) @ heads(k).mT).masked_fill((i // 4 != j // 4) | (j > i), -float("inf")), heads(v))

    def sliced(q, k, v, pad):
        longer = torch.cat([pad, pad], 1)[:, 1 : 1 + q.shape[1]]
        return F.scaled_dot_product_attention(*map(heads, (q, k, v)), attn_mask=longer[:, None, None].bool())

    found = {f.__name__: (f, w) for f, w in ((keys_and_causal, "padding"), (float_mask, "padding"))}
    found |= {f.__name__: (f, w) for f, w in ((flattened, "padding"), (chunked, "segments"), (sliced, "padding"))}
    x = tuple(torch.randn(B, N, H * D, generator=torch.Generator().manual_seed(s)).requires_grad_() for s in range(3))
    return {name: (fn, (*x, padding()), words) for name, (fn, words) in found.items()}


@pytest.mark.parametrize("name", dynamic_cases())
def test_symbolic_sizes(name: str) -> None:
    fn, args, words = dynamic_cases()[name]
    backend = compile_and_compare(fn, args, dynamic=True)
    (site,) = backend.sites
    assert site.replaced and site.spec is not None and words in site.spec.extras, site


def test_blocks_are_skipped_on_cuda() -> None:
    """The ranges of visible blocks are an input of the CUDA kernels, once for padding and segments together."""

    def fn(q, k, v, pad, pos):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=hf(B, pad, pos))

    gm = capture(fn, *(x.detach() for x in qkv(H, q_len=N, dim=D, batch=B)), padding(), ragged())
    with FakeTensorMode():
        for node in gm.graph.nodes:
            known = node.meta.get("example_value")
            if isinstance(known, torch.Tensor):
                cuda = torch.empty_strided(known.shape, known.stride(), dtype=known.dtype, device="cuda")
                node.meta["example_value"] = cuda
    # on a build without CUDA nothing can be computed on fake CUDA tensors
    with mock.patch.object(emit_operands, "BLOCK_RANGES", _ranges):
        (site,) = rewrite_graph(gm.graph)
    assert site.replaced, site.reason
    (ranges,) = [n for n in gm.graph.nodes if n.target is _ranges]
    (op,) = [n for n in gm.graph.nodes if "attn" in str(n.target) and "flashbwd" in str(n.target)]
    assert list(ranges.args[:3]) == [op.kwargs[x] for x in ("mask", "query_segments", "key_segments")]
    assert [op.kwargs[x].args for x in ("key_range", "query_range")] == [(ranges, 0), (ranges, 1)]


def _ranges(mask: Any, query_segments: Any, key_segments: Any, q_len: int, kv_len: int) -> tuple[Any, Any]:
    shapes = [(1, -(-length // 128), 2) for length in (q_len, kv_len)]
    return tuple(torch.empty(shape, dtype=torch.int32, device="cuda") for shape in shapes)  # type: ignore[return-value]
