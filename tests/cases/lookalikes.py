"""Graphs that look like attention and are not, or not quite."""

import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention as sdpa

from .book import Book
from .inputs import Maker
from .small import NEG, attn, close, gap

CASES = Book()
case = CASES.case


@case(
    "k_permuted_by_hand",
    links=["pytorch/pytorch#195320", "pytorch/pytorch#195383", "pytorch/pytorch#100316"],
    kind="matcher ignores permute dims",
    fuse="either",
    symptom="any permute of k is taken for k.transpose(-2, -1); wrong numbers when sizes agree, else a crash",
    want="the graph as written: k [B,S,H,D] permuted straight to [B,H,D,S] is ordinary attention, the others are not",
    stock={"compile": "stock 2.13 sfdp patterns mis-bind a permuted K (pytorch/pytorch#195320)"},
)
def _(dev, dt):
    r = Maker("k_permuted_by_hand", dev, dt)
    outs = []
    for b, s, h, d in ((4, 4, 4, 4), (2, 6, 6, 8), (2, 5, 3, 8)):
        x = [r(b, s, h, d) for _ in range(3)]
        for perm in ((0, 2, 3, 1), (0, 3, 2, 1), (2, 0, 3, 1)):
            if (b, s, h, d) != (4, 4, 4, 4) and perm != (0, 2, 3, 1):
                continue

            def mul(q, k, v, perm=perm):
                q, v = q.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
                return (torch.matmul(q, k.permute(perm)) * 0.5).softmax(dim=-1).matmul(v)

            def div(q, k, v, perm=perm):
                q, v = q.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
                return torch.matmul(q, k.permute(perm)).div(1.7).softmax(dim=-1).matmul(v)

            outs += [{"fn": f, "calls": [tuple(x)], "diff": g} for f in (mul, div) for g in ((), (0, 1, 2))]
    return outs


@case(
    "softmax_other_dim",
    links=["pytorch/pytorch#196468"],
    kind="matcher ignores the softmax dim",
    fuse="no",
    symptom="softmax over dim -2 / 1 / 0 is replaced by attention over the last dim",
    want="the graph as written",
    stock={"compile": "stock 2.13 sfdp patterns ignore the softmax dim (pytorch/pytorch#196468)"},
)
def _(dev, dt):
    r = Maker("softmax_other_dim", dev, dt)
    q, k, v = r(3, 2, 5, 8), r(3, 2, 5, 8), r(3, 2, 5, 8)
    outs = []
    for dim in (-2, 1, 0, -1):

        def fn(q, k, v, dim=dim):
            return torch.softmax(q @ k.transpose(-2, -1) / 3.0, dim=dim) @ v

        outs.append({"fn": fn, "calls": [(q, k, v)]})
        outs.append({"fn": fn, "calls": [(q, k, v)], "diff": ()})
    return outs


@case(
    "five_dims_and_three",
    links=["pytorch/pytorch#195589"],
    kind="rank of the operands",
    fuse="either",
    symptom="5-D attention (axial, windows of an image) is replaced by a kernel that assumes 4-D",
    want="leading dims are batch dims, whatever their number; a linear layer behind it must still work",
    stock={"compile": "stock 2.13: sfdp on 5-D builds an invalid addmm (pytorch/pytorch#195589)"},
)
def _(dev, dt):
    r = Maker("five_dims_and_three", dev, dt)
    w = r(8, 8)
    outs = []
    for lead in ((2, 3, 2), (3,), (1, 1, 2), (2, 2, 1, 2)):
        q, k, v = r(*lead, 4, 8), r(*lead, 6, 8), r(*lead, 6, 8)

        def fn(q, k, v, w):
            o = ((q @ k.transpose(-2, -1)) / 8**0.5).softmax(-1).matmul(v)
            return o.reshape(-1, 4, 8) @ w

        outs += [{"fn": fn, "calls": [(q, k, v, w)]}, {"fn": fn, "calls": [(q, k, v, w)], "diff": ()}]
    return outs


@case(
    "weights_returned_too",
    links=["keras-team/keras#23186", "huggingface/transformers#40352"],
    kind="intermediate used elsewhere",
    fuse="no",
    symptom="attention weights are also an output (output_attentions), and are lost or their gradient is",
    want="both outputs, and gradients through both",
)
def _(dev, dt):
    r = Maker("weights_returned_too", dev, dt)
    q, k, v = r(2, 2, 11, 16), r(2, 2, 14, 16), r(2, 2, 14, 16)

    def fn(q, k, v):
        p = torch.softmax(q @ k.transpose(-2, -1) * 0.25, -1)
        return p @ v, p

    def ent(q, k, v):
        p = torch.softmax(q @ k.transpose(-2, -1) * 0.25, -1)
        return p @ v, (p * torch.log(p + 1e-9)).sum(-1).mean()

    return [{"fn": fn, "calls": [(q, k, v)]}, {"fn": ent, "calls": [(q, k, v)]}]


@case(
    "lse_returned_and_differentiated",
    links=[
        "Dao-AILab/flash-attention#1817",
        "Dao-AILab/flash-attention#889",
        "Dao-AILab/flash-attention#141",
        "pytorch/pytorch#181645",
    ],
    kind="gradient of the log-sum-exp dropped",
    fuse="either",
    symptom="lse is an output and part of the loss; its gradient is silently ignored (or lse is in base 2)",
    want="natural-log lse, and d(lse)/dq, dk flow",
)
def _(dev, dt):
    r = Maker("lse_returned_and_differentiated", dev, dt)
    q, k, v = r(2, 2, 15, 16), r(2, 2, 31, 16), r(2, 2, 31, 16)

    def fn(q, k, v):
        s = q @ k.transpose(-2, -1) * 0.25
        return s.softmax(-1) @ v, torch.logsumexp(s, -1)

    return {"fn": fn, "calls": [(q, k, v)]}


@case(
    "dropout_is_kept",
    links=["pytorch/pytorch#100452", "pytorch/pytorch#124464"],
    kind="dropout dropped",
    fuse="either",
    symptom="the fused graph forgets dropout, or forgets to rescale, or draws another mask in backward",
    want="with v = identity the output IS the weight matrix: each entry 0 or w/(1-p), about half 0; same seed, "
    "same result; dv = out^T g and nothing else",
)
def _(dev, dt):
    def check(wrap):
        r = Maker("dropout_is_kept", dev, dt)
        n = 64
        q, k = r(1, 2, n, 16), r(1, 2, n, 16)
        eye = torch.eye(n, device=dev).expand(1, 2, n, n).contiguous()

        def hand(q, k, v):
            return F.dropout(torch.softmax(q @ k.transpose(-2, -1) * 0.25, -1), 0.5, True) @ v

        def lib(q, k, v):
            return sdpa(q, k, v, dropout_p=0.5, scale=0.25)

        w = torch.softmax(q @ k.transpose(-2, -1) * 0.25, -1)
        for fn in (hand, lib):
            c = wrap(fn)
            v = eye.clone().requires_grad_()
            torch.manual_seed(3)
            o = c(q, k, v)
            zero = o == 0
            assert 0.42 < zero.float().mean() < 0.58, f"share of zeros {zero.float().mean():.3f}"
            assert ((o - 2 * w).abs()[~zero] < 1e-5).all(), "kept weights are not w / (1 - p)"
            g = r(1, 2, n, n)
            o.backward(g)
            assert close(v.grad, o.detach().transpose(-2, -1) @ g, 1e-5), "backward used another dropout mask"
            torch.manual_seed(3)
            assert torch.equal(c(q, k, v), o), "same seed, other result"
            torch.manual_seed(4)
            assert not torch.equal(c(q, k, v) == 0, zero), "same mask for another seed"

    return {"check": check}


@case(
    "same_tensor_three_times",
    links=["pytorch/pytorch#181146"],
    kind="aliased inputs",
    fuse="yes",
    symptom="one tensor passed as q, k and v: only one slot's gradient arrives",
    want="the sum of the three slots' gradients",
)
def _(dev, dt):
    r = Maker("same_tensor_three_times", dev, dt)
    x = r(2, 2, 26, 16)
    return [
        {"fn": lambda x: sdpa(x, x, x, is_causal=True), "calls": [(x,)]},
        {"fn": lambda a, b, c: attn(a, b, c), "calls": [(x, x, x)], "diff": (0,)},
    ]


@case(
    "sink_column",
    links=["Dao-AILab/flash-attention#1973", "radixark/miles#1500", "fla-org/flash-linear-attention#831"],
    kind="extra term in the softmax denominator",
    fuse="no",
    symptom="a learned sink logit, cut off after softmax, is dropped; or its gradient is",
    want="rows sum to less than 1; the sink gets its gradient",
)
def _(dev, dt):
    r = Maker("sink_column", dev, dt)
    s = 22
    q, k, v, sink = r(2, 3, s, 16), r(2, 3, s, 16), r(2, 3, s, 16), r(3)

    def fn(q, k, v, sink):
        w = q @ k.transpose(-2, -1) * 0.25
        w = w.masked_fill(gap(s, s, q.device) < 0, NEG)
        w = torch.cat([w, sink.view(1, 3, 1, 1).expand(2, 3, s, 1)], -1)
        return torch.softmax(w, -1)[..., :-1] @ v

    return {"fn": fn, "calls": [(q, k, v, sink)]}


@case(
    "explicit_round_to_half_in_the_middle",
    links=["pytorch/pytorch#181568", "pytorch/pytorch#176565", "pytorch/pytorch#171190"],
    kind="explicit cast removed",
    fuse="no",
    symptom="scores.to(bf16) in an fp32 graph is optimised away, so precision differs from what was written",
    want="with emulate_precision_casts (stock Inductor's switch for keeping casts) the rounding takes place: "
    "the result is eager's, so the fused op must not swallow the cast",
)
def _(dev, dt):
    r = Maker("explicit_round_to_half_in_the_middle", dev, dt)
    q, k, v = r(1, 2, 12, 16), r(1, 2, 12, 16), r(1, 2, 12, 16)

    def fn(q, k, v):
        s = (q @ k.transpose(-2, -1) * 2.0).to(torch.bfloat16).to(torch.float32)
        return torch.softmax(s, -1) @ v

    return {
        "fn": fn,
        "calls": [(q, k, v)],
        "diff": (),
        "ref_own_dtype": True,
        "config": {"emulate_precision_casts": True},
    }


@case(
    "mixed_dtype_must_raise",
    links=["huggingface/diffusers#14104", "Dao-AILab/flash-attention#732"],
    kind="mixed dtypes",
    fuse="no",
    symptom="q, k in fp32 (after a norm) and v in bf16: eager SDPA raises, a replaced op may compute something",
    want="an exception, as in eager",
)
def _(dev, dt):
    def check(wrap):
        r = Maker("mixed_dtype_must_raise", dev, dt)
        q, k, v = r(1, 2, 8, 16), r(1, 2, 8, 16), r(1, 2, 8, 16, dtype=torch.bfloat16)
        for a in ((q, k, v), (q.bfloat16(), k, k), (q, k.half(), q)):
            try:
                wrap(lambda q, k, v: sdpa(q, k, v))(*a)
            except Exception:
                continue
            raise AssertionError("no exception for dtypes " + str([t.dtype for t in a]))

    return {"check": check}


@case(
    "einsum_spellings",
    links=["pytorch/pytorch#195383", "pytorch/pytorch#195320"],
    kind="matcher ignores permute dims",
    fuse="either",
    symptom="attention by einsum on [B, S, H, D]; and the lookalike that attends over heads instead of tokens",
    want="as written; S == H so that shapes agree",
)
def _(dev, dt):
    r = Maker("einsum_spellings", dev, dt)
    q, k, v = r(2, 5, 5, 8), r(2, 5, 5, 8), r(2, 5, 5, 8)

    def tokens(q, k, v):
        p = torch.einsum("bqhd,bkhd->bhqk", q, k).div(3.0).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", p, v)

    def heads(q, k, v):
        p = torch.einsum("bshd,bsgd->bshg", q, k).div(3.0).softmax(-1)
        return torch.einsum("bshg,bsgd->bshd", p, v)

    def crossed(q, k, v):
        p = torch.einsum("bqhd,bkhd->bqhk", q, k).mul(0.4).softmax(-1)
        return torch.einsum("bqhk,bhkd->bqhd", p, v)

    return [{"fn": f, "calls": [(q, k, v)], "diff": d} for f in (tokens, heads, crossed) for d in ((), (0, 1, 2))]
