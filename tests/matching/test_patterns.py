"""Spellings of attention and what they mean, and graphs after the rewrite.  Their twins: test_twins.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from pattern_inputs import hf_mask, hidden, minus, repeat_kv, seen
from site_helpers import Rewriter, compile_and_compare, qkv

from flash_inductor.spec import AttentionSpec, MaskSpec

FULL, CAUSAL, WINDOW = MaskSpec(), MaskSpec(upper=0), MaskSpec(-3, 0)


# --- what is recognised: name -> (function, arguments, spec)

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], AttentionSpec]] = {}


def case(spec: AttentionSpec, **sizes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        CASES[fn.__name__] = (fn, qkv(**sizes), spec)
        return fn

    return add


@case(AttentionSpec(0.25, CAUSAL), kv_heads=2)
def a1_flags(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)


@case(AttentionSpec(None, FULL), kv_len=7)
def a2_cross(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


@case(AttentionSpec(None, CAUSAL), kv_heads=2)
def a3_mask_and_repeat(q, k, v):
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=seen(q.shape[2]))


@case(AttentionSpec(None, CAUSAL))
def a3_float_mask(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=minus(q.shape[2]))


@case(AttentionSpec(None, FULL), kv_heads=1)
def sdpa_broadcast_head(q, k, v):
    return F.scaled_dot_product_attention(q, k.expand(-1, 4, -1, -1), v.expand(-1, 4, -1, -1))


@case(AttentionSpec(0.5, FULL))
def b1_full(q, k, v):
    return F.softmax(q @ k.transpose(-1, -2) * 0.5, dim=-1) @ v


@case(AttentionSpec(0.25, WINDOW), kv_heads=2)
def b2_hf_eager(q, k, v):
    k, v = repeat_kv(k, 2), repeat_kv(v, 2)
    a = torch.matmul(q, k.transpose(2, 3)) * 0.25 + hf_mask(q.shape[2], 4)
    a = F.softmax(a, dim=-1, dtype=torch.float32).to(q.dtype)
    a = F.dropout(a, p=0.0, training=True)
    return torch.matmul(a, v).transpose(1, 2).contiguous()


@case(AttentionSpec(0.25, WINDOW, 5.0), kv_heads=2)
def b5_softcap(q, k, v):
    k, v = repeat_kv(k, 2), repeat_kv(v, 2)
    a = torch.matmul(q, k.transpose(2, 3)) * 0.25
    a = torch.tanh(a / 5.0) * 5.0 + hf_mask(q.shape[2], 4)
    return torch.matmul(F.softmax(a, dim=-1, dtype=torch.float32).to(q.dtype), v)


@case(AttentionSpec(0.25, CAUSAL))
def b7_masked_fill_eval(q, k, v):
    a = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    a = a.masked_fill(hidden(q.shape[2]), float("-inf"))
    return F.dropout(F.softmax(a, dim=-1), 0.1, training=False) @ v


@case(AttentionSpec(1.0, WINDOW))
def b8_two_masks(q, k, v):
    a = torch.matmul(q.float(), k.float().transpose(-1, -2))
    n = q.shape[2]
    near = torch.arange(n)[None] > torch.arange(n)[:, None] - 4
    a = torch.where(near, a, torch.tensor(torch.finfo(a.dtype).min, dtype=a.dtype)) + hf_mask(n)
    return torch.matmul(F.softmax(a, dim=-1).to(v.dtype), v)


@case(AttentionSpec(0.25, FULL))
def c1_baddbmm(q, k, v):
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    a = torch.baddbmm(torch.empty(q.shape[0], q.shape[1], k.shape[1]), q, k.transpose(-1, -2), beta=0, alpha=0.25)
    return torch.bmm(a.softmax(dim=-1).to(q.dtype), v)


@case(AttentionSpec(0.5, CAUSAL))
def c1_baddbmm_mask(q, k, v):
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    a = torch.baddbmm(minus(q.shape[1])[None], q, k.mT, beta=1, alpha=0.5)
    return torch.bmm(a.softmax(-1), v)


@case(AttentionSpec(0.25, CAUSAL))
def c2_regrouped(q, k, v):
    b, h, s, d = q.shape
    q, k, v = (x.reshape(b * h, s, d) for x in (q, k, v))
    a = torch.bmm(q, k.transpose(1, 2)).mul(0.25).view(b, h, s, s) + hf_mask(s)
    return torch.bmm(F.softmax(a, dim=-1).view(b * h, s, s), v)


@case(AttentionSpec(0.25, CAUSAL))
def c2_regrouped_for_values(q, k, v):
    b, h, s, d = q.shape
    a = torch.bmm(q.reshape(b * h, s, d), k.reshape(b * h, s, d).mT) * 0.25
    a = a.masked_fill(hidden(s), -1e9)
    return a.softmax(-1).view(b, h, s, s) @ v


@case(AttentionSpec(1.0, FULL))
def c3_scaled_query(q, k, v):
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q * 0.25, k, v))
    return torch.bmm(F.dropout(F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1).type_as(q), 0.0), v)


@case(AttentionSpec(0.25, CAUSAL))
def d1_einsum(q, k, v):
    s = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.25
    i, j = s.shape[-2:]
    s = s.masked_fill(torch.ones((i, j), dtype=torch.bool).triu(j - i + 1), -torch.finfo(s.dtype).max)
    return torch.einsum("b h i j, b h j d -> b h i d", F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype), v)


@case(AttentionSpec(0.25, CAUSAL), kv_heads=2)
def d2_bshd(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=2)
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.25
    s = s.masked_fill(hidden(s.shape[-1]), float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", F.softmax(s, -1), v)


@case(AttentionSpec(0.25, CAUSAL, 3.0), kv_heads=2)
def d3_grouped(q, k, v):
    b, h, t, d = q.shape
    q = q.transpose(1, 2).reshape(b, t, k.shape[1], -1, d)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    s = 3.0 * torch.tanh(torch.einsum("bqhgd,bkhd->bhgqk", q, k) * 0.25 / 3.0)
    return torch.einsum("bhgqk,bkhd->bqhgd", (s + minus(t)).softmax(-1), v).reshape(b, t, h, d)


@case(AttentionSpec(0.25, FULL))
def key_first_and_ellipsis(q, k, v):
    return torch.einsum("...nm,...md->...nd", torch.einsum("...kd,...qd->...qk", k, q).mul(0.25).softmax(-1), v)


@case(AttentionSpec(0.25, FULL), kv_heads=1)
def multi_query_broadcast(q, k, v):
    return torch.matmul(torch.softmax(torch.matmul(q, k.mT) / 4, -1), v)


@case(AttentionSpec(0.25, FULL))
def scale_on_both_sides(q, k, v):
    s = 16**-0.25
    return torch.softmax((q * s) @ (k * s).transpose(-2, -1), -1) @ v


@case(AttentionSpec(0.25, FULL))
def scale_by_constant_tensor(q, k, v):
    return torch.softmax(q @ k.mT / torch.sqrt(torch.tensor(16.0)), -1) @ v


@case(AttentionSpec(0.25, CAUSAL))
def inplace_results(q, k, v):
    s = q @ k.mT
    s /= 4.0
    s += minus(q.shape[2])
    return s.softmax(-1) @ v


@case(AttentionSpec(0.25, CAUSAL))
def x1_statement(q, k, v):
    s = torch.matmul(q, k.transpose(-1, -2)).div_(4.0)
    s.masked_fill_(hidden(q.shape[2]), float("-inf"))
    return torch.matmul(F.softmax(s, -1), v)


@case(AttentionSpec(0.25, CAUSAL))
def stable_softmax(q, k, v):
    s = (q @ k.mT * 0.25).masked_fill(hidden(q.shape[2]), float("-inf"))
    s = s - s.max(dim=-1, keepdim=True).values
    return s.softmax(-1) @ v


@case(AttentionSpec(0.25, CAUSAL))
def where_drop(q, k, v):
    return torch.where(hidden(q.shape[2]), -1e9, q @ k.mT * 0.25).softmax(-1) @ v


@case(AttentionSpec(0.125, CAUSAL))
def temperature_after_mask(q, k, v):
    return ((q @ k.mT * 0.25).masked_fill(hidden(q.shape[2]), float("-inf")) / 2).softmax(-1) @ v


@case(AttentionSpec(0.25, FULL, 2.0))
def softcap_with_scale_inside(q, k, v):
    return (2 * ((q @ k.mT) * 0.125).tanh()).softmax(-1) @ v  # == 2 tanh(0.25 s / 2)


@case(AttentionSpec(0.25, FULL))
def single_head_3d(q, k, v):
    q, k, v = q[:, 0], k[:, 0], v[:, 0]
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


@case(AttentionSpec(0.25, FULL))
def two_dims(q, k, v):
    q, k, v = q[0, 0], k[0, 0], v[0, 0]
    return torch.softmax(q @ k.t() * 0.25, -1) @ v


@case(AttentionSpec(0.25, FULL))
def windows_5d(q, k, v):
    q, k, v = (x.unflatten(2, (3, -1)).transpose(1, 2) for x in (q, k, v))
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


@pytest.mark.parametrize("name", CASES)
def test_is_replaced_and_equal(name: str) -> None:
    fn, args, spec = CASES[name]
    backend = compile_and_compare(fn, args)
    assert [s.reason for s in backend.sites] == [None]
    found = backend.sites[0].spec
    assert found is not None and found.mask == spec.mask
    assert found.softcap == pytest.approx(spec.softcap) and found.scale == pytest.approx(spec.scale)
    assert "softmax" not in backend.ops() and "scaled_dot_product_attention" not in backend.ops()


@pytest.mark.parametrize("name", ["a1_flags", "a3_mask_and_repeat", "b2_hf_eager", "d2_bshd", "d3_grouped"])
def test_grouped_heads_are_not_repeated(name: str) -> None:
    fn, args, _ = CASES[name]
    backend = compile_and_compare(fn, args)
    assert not {"expand", "repeat_interleave", "reshape"} & (
        set(backend.ops()) - ({"reshape"} if "d3" in name else set())
    )
    (op,) = [n for n in backend.graphs[0].graph.nodes if "flashbwd" in str(n.target)]
    assert op.args[1].meta["example_value"].shape[1] == 2


def test_wrong_repeat_keeps_full_heads() -> None:
    """``repeat`` orders heads 0 1 0 1, GQA wants 0 0 1 1: K and V may not be stripped, the rest may be replaced."""

    def fn(q, k, v):
        k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
        return torch.softmax(q @ k.mT * 0.25, -1) @ v

    backend = compile_and_compare(fn, qkv(kv_heads=2))
    assert [s.replaced for s in backend.sites] == [True]
    assert backend.ops().count("repeat") == 2


def test_repeat_of_keys_only_keeps_full_heads() -> None:
    def fn(q, k, v):
        return torch.softmax(q @ k.repeat_interleave(2, 1).mT * 0.25, -1) @ v

    q, k, _ = qkv(kv_heads=2)
    backend = compile_and_compare(fn, (q, k, qkv()[2]))
    assert [s.replaced for s in backend.sites] == [True] and "repeat_interleave" in backend.ops()


def test_untransposed_key_is_read_as_written() -> None:
    """q @ k with as many keys as features: the columns of k are the keys, and so they stay."""

    def fn(q, k, v):
        return torch.softmax(q @ k * 0.25, -1) @ v

    assert [s.replaced for s in compile_and_compare(fn, qkv(q_len=16)).sites] == [True]


class Name(str):
    __repr__ = str.__str__


class TestGraphs(expecttest.TestCase):
    """Small graphs after the rewrite."""

    def graph(self, name: str) -> str:
        fn, args, _ = CASES[name]
        torch._dynamo.reset()
        backend = Rewriter()
        torch.compile(fn, backend=backend)(*args)
        names: dict[torch.fx.Node, str] = {}  # Dynamo's own names differ between versions of torch
        lines = []
        for node in backend.graphs[0].graph.nodes:
            args = torch.fx.map_arg(node.args, lambda n: Name(names[n]))
            names[node] = f"t{len(names)}"
            if node.op == "placeholder":
                names[node] = str(node.target).strip("_").removeprefix("L_")
            else:
                words = [str(a) for a in args] + [f"{k}={v}" for k, v in node.kwargs.items()]
                lines.append(f"{names[node]} = {getattr(node.target, '__name__', node.target)}({', '.join(words)})")
        return "\n".join(lines)

    def test_flags(self) -> None:
        self.assertExpectedInline(
            self.graph("a1_flags"),
            """\
t3 = attn.default(q, k, v, is_causal=True, scale=0.25)
t4 = getitem(t3, 0)
t5 = output((t4,))""",
        )

    def test_hf_eager(self) -> None:
        self.assertExpectedInline(
            self.graph("b2_hf_eager"),
            """\
t3 = attn.default(q, k, v, window_left=3, is_causal=True, scale=0.25)
t4 = getitem(t3, 0)
t5 = transpose(t4, 1, 2)
t6 = contiguous(t5)
t7 = output((t6,))""",
        )

    def test_grouped_einsum(self) -> None:
        self.assertExpectedInline(
            self.graph("d3_grouped"),
            """\
t3 = transpose(q, 1, 2)
t4 = reshape(t3, 2, 12, 2, -1, 16)
t5 = permute.default(t4, [0, 2, 3, 1, 4])
t6 = flatten.using_ints(t5, 1, 2)
t7 = attn.default(t6, k, v, is_causal=True, scale=0.25, softcap=3.0)
t8 = getitem(t7, 0)
t9 = unflatten.int(t8, 1, [2, 2])
t10 = permute.default(t9, [0, 3, 1, 2, 4])
t11 = permute.default(t10, [0, 2, 1, 3, 4])
t12 = contiguous.default(t11)
t13 = permute.default(t12, [0, 2, 1, 3, 4])
t14 = reshape(t13, 2, 12, 4, 16)
t15 = output((t14,))""",
        )

    def test_folded_heads(self) -> None:
        self.assertExpectedInline(
            self.graph("c1_baddbmm"),
            """\
t3 = reshape(q, -1, 12, 16)
t4 = reshape(k, -1, 12, 16)
t5 = reshape(v, -1, 12, 16)
t6 = unsqueeze.default(t3, 1)
t7 = unsqueeze.default(t4, 1)
t8 = unsqueeze.default(t5, 1)
t9 = attn.default(t6, t7, t8, scale=0.25)
t10 = getitem(t9, 0)
t11 = squeeze.dim(t10, 1)
t12 = output((t11,))""",
        )
