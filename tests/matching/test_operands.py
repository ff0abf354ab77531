"""Masks and biases that need a tensor: each form with what it becomes, outputs and gradients as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pattern_inputs import INF, minus
from site_helpers import compile_and_compare, qkv

import flash_inductor
from flash_inductor.report import collect

B, H, N, D = 2, 4, 12, 16
LOW = torch.finfo(torch.float32).min

# name: (function, arguments, words of the report, what the op gets)
FORMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str, dict[str, list[int]]]] = {}


def form(words: str, *more: Any, **operands: list[int]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        FORMS[fn.__name__] = (fn, (*qkv(H, q_len=N, dim=D, batch=B), *more), words, operands)
        return fn

    return add


def padding() -> torch.Tensor:
    """What a tokenizer gives: the second row is padded on the right."""
    mask = torch.ones(B, N, dtype=torch.long)
    mask[1, 8:] = 0
    return mask


def ragged() -> torch.Tensor:
    """Positions of packed sequences, each starting at 0."""
    return torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1, 2]])


def anything(*shape: int, seed: int = 1) -> torch.Tensor:
    """A bool mask of no structure; the diagonal is True."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(*shape, N, N, generator=generator) > 0.4) | torch.eye(N, dtype=torch.bool)


def learned(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).requires_grad_()


def columns() -> torch.Tensor:
    return torch.arange(N)[None, :]


def rows() -> torch.Tensor:
    return torch.arange(N)[:, None]


def attend(scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores, -1) @ v


def hf(b: int, pad: torch.Tensor | None = None, pos: torch.Tensor | None = None, window: int | None = None) -> Any:
    """What transformers 5 leaves in the graph."""
    bi = torch.arange(b)[:, None, None, None]
    i, j = torch.arange(N)[None, None, :, None], torch.arange(N)[None, None, None, :]
    q, k = (i, j) if pos is None else (pos[bi, i], pos[bi, j])
    m = i.new_ones((), dtype=torch.bool)
    if window is not None:
        m = m & (k > q - window)
    m = m & (k <= q)
    if pos is not None:
        segments = (torch.diff(pos, prepend=pos[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        m = m & (segments[bi, i] == segments[bi, j])
    if pad is not None:
        m = m & pad.to(torch.bool)[bi, j]
    return m.expand(b, -1, N, N)


# --- key padding


@form("causal, padding", padding(), mask=[B, 1, 1, N])
def sdpa_causal_and_padding(q, k, v, pad):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=hf(B, pad))


@form("causal, window 4, padding", padding(), mask=[B, 1, 1, N])
def eager_window_and_padding(q, k, v, pad):
    return attend(q @ k.mT * 0.25 + torch.where(hf(B, pad, window=5), 0.0, -INF), v)


@form("causal, padding", padding().flip(1), mask=[B, 1, 1, N])
def left_padding(q, k, v, pad):
    out = attend(q @ k.mT * 0.25 + torch.where(hf(B, pad), 0.0, torch.finfo(q.dtype).min), v)
    return out[:, :, 4:]  # the rows of padding see nothing


@form("full, padding", padding(), mask=[B, 1, 1, N])
def masked_fill_where_zero(q, k, v, pad):
    return attend((q @ k.mT * 0.25).masked_fill(pad[:, None, None, :] == 0, -1e9), v)


@form("full, padding", padding() == 0, mask=[B, 1, 1, N])
def key_padding_mask(q, k, v, hidden):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden.view(B, 1, 1, N).expand(-1, H, -1, -1))


@form("full, padding", padding(), mask=[B, 1, 1, N])
def one_minus_mask(q, k, v, pad):
    return attend(q @ k.mT * 0.25 + (1.0 - pad.bool()[:, None, None, :].float()) * torch.finfo(q.dtype).min, v)


@form("full, padding", padding() == 0, mask=[B, 1, 1, N])
def filled_in_place(q, k, v, hidden):
    added = torch.zeros(B, 1, 1, N)
    added.masked_fill_(hidden[:, None, None], -INF)
    return attend(q @ k.mT * 0.25 + added, v)


@form("full, padding", torch.tensor([5, 12]), mask=[B, 1, 1, N])
def lengths(q, k, v, length):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(columns() < length[:, None])[:, None, None])


@form("causal, padding", padding().bool(), padding().bool(), mask=[B, 1, 1, N])
def two_masks_of_keys(q, k, v, a, b):
    s = (q @ k.mT).masked_fill(~a[:, None, None], -INF) + minus(N)
    return attend(s.where(b[:, None, None], torch.tensor(-INF)), v)


@form("full, padding", padding().bool(), mask=[B * H, 1, 1, N])
def three_dims(q, k, v, pad):
    q, k, v = (x.reshape(B * H, N, D) for x in (q, k, v))
    scores = torch.bmm(q, k.mT).view(B, H, N, N).masked_fill(~pad[:, None, None], -INF)
    return torch.bmm(torch.softmax(scores.view(B * H, N, N), -1), v)


# --- segments


@form("causal, segments", ragged(), query_segments=[B, N], key_segments=[B, N])
def packed_positions(q, k, v, pos):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=hf(B, pos=pos))


@form("causal, window 2, segments", ragged(), query_segments=[B, N], key_segments=[B, N])
def packed_positions_and_window(q, k, v, pos):
    return attend(q @ k.mT + torch.where(hf(B, pos=pos, window=3), 0.0, torch.finfo(q.dtype).min), v)


@form("causal, segments", query_segments=[1, N], key_segments=[1, N])
def chunks(q, k, v):
    same = rows() // 4 == columns() // 4
    return F.scaled_dot_product_attention(q, k, v, attn_mask=same & (columns() <= rows()))


@form("full, segments", (ragged() // 3).int(), query_segments=[B, N], key_segments=[B, N])
def documents(q, k, v, ids):
    return attend((q @ k.mT).masked_fill((ids[:, :, None] != ids[:, None, :])[:, None], -INF), v)


@form("full, segments", torch.tensor([[7] * 5 + [1] * 7] * B), query_segments=[B, N], key_segments=[B, N])
def documents_by_their_ends(q, k, v, tokens):
    ids = (tokens == 7).cumsum(-1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(ids[:, None, :, None] == ids[:, None, None, :]))


# --- masks of no structure


@form("full, mask", anything(B, 1), mask=[B, 1, N, N])
def opaque_bool(q, k, v, m):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m)


@form("full, mask", ~anything(B, H), mask=[B, H, N, N])
def opaque_drop(q, k, v, m):
    return attend((q @ k.mT).masked_fill(m, torch.finfo(q.dtype).min), v)


@form("causal, mask", anything(), mask=[1, 1, N, N])
def opaque_and_causal(q, k, v, m):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m & (columns() <= rows()))


@form("causal, mask", anything(B, 1), mask=[B, 1, N, N])
def opaque_condition_of_a_float_mask(q, k, v, m):
    return attend(q @ k.mT + torch.where(m & (columns() <= rows()), 0.0, torch.finfo(q.dtype).min), v)


@form("full, mask", ragged() // 3, mask=[B, 1, N, N])
def documents_of_64_bits(q, k, v, ids):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=ids[:, None, :, None] == ids[:, None, None, :])


@form("full, mask", mask=[1, 1, N, N])
def prefix_and_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(columns() <= rows()) | (columns() < 5))


@form("full, mask", torch.ones(1, 1, 2 * N, 2 * N).tril(), mask=[1, 1, N, N])
def a_triangle_that_is_an_input(q, k, v, tril):
    return attend((q @ k.mT).masked_fill(tril[:, :, :N, :N] == 0, -INF), v)


@form("full, mask", padding().flip(1), mask=[B, 1, N, 1])
def queries_that_see_all_or_nothing(q, k, v, m):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m.bool()[:, None, :, None])


# --- biases


@form("full, bias", learned(1, H, N, N), bias=[1, H, N, N])
def sdpa_bias(q, k, v, bias):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@form("causal, bias, scale 1", learned(1, H, N, N), bias=[1, H, N, N])
def t5(q, k, v, bias):
    return attend(q @ k.mT + (bias + torch.where(columns() <= rows(), 0.0, torch.finfo(q.dtype).min)), v)


@form("full, padding, bias", learned(1, H, N, N), padding(), bias=[1, H, N, N], mask=[B, 1, 1, N])
def bias_and_padding(q, k, v, bias, pad):
    added = torch.where(pad.bool()[:, None, None], 0.0, torch.finfo(q.dtype).min)
    return attend(q @ k.mT + bias + added, v)


@form("full, bias", padding(), bias=[B, 1, 1, N])
def numbers_that_may_be_no_mask(q, k, v, pad):
    return attend(q @ k.mT + (1.0 - pad[:, None, None, :]) * torch.finfo(q.dtype).min, v)


@form("full, bias", padding().float(), bias=[B, 1, 1, N])
def subtracted(q, k, v, pad):
    return attend(q @ k.mT * 0.25 - 1e4 * (1 - pad[:, None, None]), v)


@form("causal, bias", -torch.rand(B * H, 1, N), bias=[B * H, 1, 1, N])
def bloom(q, k, v, alibi):
    q, k, v = (x.reshape(B * H, N, D) for x in (q, k, v))
    scores = alibi.baddbmm(q, k.mT, beta=1.0, alpha=0.25).view(B, H, N, N) + minus(N, -1e9)
    return torch.bmm(torch.softmax(scores, -1).view(B * H, N, N), v)


@form("causal, bias, scale 0.25", -torch.rand(B, H, 1, N), bias=[B, H, 1, N])
def scaled_after_the_bias(q, k, v, alibi):
    return attend((q @ k.mT + alibi) * 0.25 + minus(N), v)


@form("causal, bias", bias=[1, H, 1, N])
def alibi_made_in_the_graph(q, k, v):
    slopes = 2.0 ** -torch.arange(1, H + 1)
    return attend(q @ k.mT + (slopes[:, None, None] * columns()).masked_fill(columns() > rows(), -INF), v)


@form("full, bias", learned(H, 1, 1), bias=[1, H, 1, N])
def learned_slopes(q, k, v, slopes):
    return attend(q @ k.mT + slopes * columns(), v)


@form("full, bias", learned(B // 1, 3, N, N), bias=[B, 1, N, N])
def one_of_several_biases(q, k, v, bias):
    return attend(q @ k.mT + bias[:, 1:2], v)


@form("full, bias", bias=[1, 1, N, N])
def mild_numbers(q, k, v):
    return attend(q @ k.mT * 0.25 + minus(N, -1.0), v)


@form("full, bias, scale 0.01", bias=[1, 1, N, N])
def scaled_down_below_hiding(q, k, v):
    return attend((q @ k.mT + minus(N, -1e5)) * 0.01, v)


@form("full, bias", learned(1, H, N, N), bias=[1, H, N, N])
def a_number_for_all_and_a_bias(q, k, v, bias):
    return attend((q @ k.mT + bias + 0) * 0.5 + 2.0, v)


@form("full, bias", bias=[B, H, N, 1])
def not_the_row_maximum_is_subtracted(q, k, v):
    return attend(q @ k.mT * 0.25 - q.amax(-1, keepdim=True), v)


@form("full, bias", learned(2, 1, N, N), bias=[2, 1, N, N])
def windows(q, k, v, mask):
    """Swin: batch is images times windows."""
    scores = (q @ k.mT).view(1, 2, H, N, N) + mask.unsqueeze(0)
    return attend(scores.view(-1, H, N, N), v)


@form("full, softcap 5, bias", learned(N, N), bias=[1, 1, N, N])
def bias_after_softcap(q, k, v, bias):
    return attend(5 * torch.tanh(q @ k.mT / 5) + bias, v)


@form("causal")
def floor_of_the_scores(q, k, v):
    return attend(torch.max(q @ k.mT + minus(N), torch.tensor(torch.finfo(q.dtype).min)), v)


@pytest.mark.parametrize("name", FORMS)
def test_is_replaced_and_equal(name: str) -> None:
    fn, args, words, operands = FORMS[name]
    backend = compile_and_compare(fn, args)
    (site,) = backend.sites
    assert site.replaced, site.reason
    assert site.spec is not None and _in_order(words, site.spec.describe()), site.spec.describe()
    (op,) = [n for gm in backend.graphs for n in gm.graph.nodes if "flashbwd.attn" in str(n.target)]
    given = {
        name: list(node.meta["example_value"].shape)
        for name, node in op.kwargs.items()
        if isinstance(node, torch.fx.Node)
    }
    assert given == operands
    assert [name for gm in backend.graphs for name in _new_tables(gm)] == []


def _in_order(words: str, text: str) -> bool:
    parts = text.split(", ")
    wanted = words.split(", ")
    return all(w in parts for w in wanted) and not {"bias", "mask", "padding", "segments"} & (set(parts) - set(wanted))


def _new_tables(gm: torch.fx.GraphModule) -> list[str]:
    """What the matcher makes of queries times keys, without negations and scaled biases."""
    ours = [n for n in gm.graph.nodes if "aten." in str(n.target) and not _is_view(n)]
    return [
        n.name
        for n in ours
        if isinstance(t := n.meta.get("example_value"), torch.Tensor)
        and t.shape[-2:] == (N, N)
        and not any(word in str(n.target) for word in ("bitwise_not", "mul"))
    ]


def _is_view(node: torch.fx.Node) -> bool:
    a, b = node.args[0].meta["example_value"], node.meta["example_value"]  # type: ignore[union-attr]
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


COMPILED = [
    "sdpa_causal_and_padding",
    "eager_window_and_padding",
    "three_dims",
    "packed_positions_and_window",
    "chunks",
    "opaque_drop",
    "bias_and_padding",
    "bloom",
    "subtracted",
    "windows",
]


def test_forms_through_inductor_equal_eager() -> None:
    """Several forms in one graph, compiled by Inductor for the CPU: forward and backward."""

    def forms(*inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        return [FORMS[name][0](*x) for name, x in zip(COMPILED, inputs, strict=True)]

    inputs = [FORMS[name][1] for name in COMPILED]
    leaves = [x for tensors in inputs for x in tensors if x.requires_grad]
    found = []
    torch._dynamo.reset()
    with flash_inductor.enabled(), flash_inductor.override(strict=True), collect() as sites:
        for fn in (torch.compile(forms, fullgraph=True, dynamic=False), forms):
            outputs = fn(*inputs)
            found.append([*outputs, *torch.autograd.grad([y.sin().sum() for y in outputs], leaves)])
    assert len(sites) == len(COMPILED) and [s.reason for s in sites if not s.replaced] == []
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
