"""Scales and biases: constants, tensors, with and without gradients."""

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from .book import Book
from .inputs import Maker
from .small import attn, gap

CASES = Book()
case = CASES.case


@case(
    "scale_is_a_tensor",
    links=["pytorch/pytorch#191203", "pytorch/pytorch#145208"],
    kind="scale not a Python constant",
    fuse="either",
    symptom="0-d tensor scale: crash in the replacement, or its value baked in, or its gradient lost",
    want="value read at run time; when it needs a gradient it gets one",
    stock={"compile": "stock 2.13: sfdp with a mask and a tensor scale crashes while tracing (pytorch/pytorch#191203)"},
)
def _(dev, dt):
    r = Maker("scale_is_a_tensor", dev, dt)
    q, k, v = r(1, 2, 12, 8), r(1, 2, 12, 8), r(1, 2, 12, 8)
    a, b = torch.tensor(0.7, device=dev), torch.tensor(2.5, device=dev)
    bias = torch.zeros(12, 12, device=dev).masked_fill(gap(12, 12, dev) < 0, -1e9)

    def div(q, k, v, s, m):
        return torch.softmax(q @ k.transpose(-2, -1) / s + m, dim=-1) @ v

    def mul(q, k, v, s, m):
        return torch.softmax((q @ k.transpose(-2, -1)) * s, dim=-1) @ v

    return [
        {"fn": f, "calls": [(q, k, v, a, bias), (q, k, v, b, bias)], "diff": d}
        for f in (div, mul)
        for d in ((), (0, 1, 2), (0, 1, 2, 3))
    ]


@case(
    "scale_not_the_default",
    links=["pytorch/pytorch#174049", "pytorch/pytorch#174361"],
    kind="scale lost in the rewrite",
    fuse="yes",
    symptom="the replacement uses 1/sqrt(d) though the graph divides by something else",
    want="/0.35, *1.0 (none at all), *3, and a scale on q only: as written",
)
def _(dev, dt):
    r = Maker("scale_not_the_default", dev, dt)
    x = r(2, 9, 2, 8), r(2, 9, 2, 8), r(2, 9, 2, 8)
    bias = r(1, 1, 9, 9)

    def base(q, k, v, m, f):
        q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
        return (f(q @ k.transpose(-2, -1)) + m).softmax(-1) @ v

    outs = []
    for f in (lambda s: s / 0.35, lambda s: s, lambda s: s * 3.0, lambda s: s.div(8**-0.5)):

        def fn(q, k, v, m, f=f):
            return base(q, k, v, m, f)

        outs += [{"fn": fn, "calls": [(*x, bias)], "diff": ()}, {"fn": fn, "calls": [(*x, bias)], "diff": (0, 1, 2)}]

    def qside(q, k, v, m):
        q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
        return ((q * 1.9) @ k.transpose(-2, -1) + m).softmax(-1) @ v

    outs.append({"fn": qside, "calls": [(*x, bias)], "diff": (0, 1, 2)})

    def lib(q, k, v, m):
        q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
        return sdpa(q, k, v, attn_mask=m, scale=0.9), sdpa(q, k, v, is_causal=True, scale=1.0)

    outs.append({"fn": lib, "calls": [(*x, bias)], "diff": (0, 1, 2)})
    return outs


@case(
    "per_head_temperature",
    links=["pytorch/pytorch#99296", "pytorch/pytorch#145208"],
    kind="scale not a constant",
    fuse="either",
    symptom="a learned [H, 1, 1] temperature (or one per query) is squeezed into a float",
    want="per-head and per-query scales, with their gradients, as multiplication and division",
)
def _(dev, dt):
    r = Maker("per_head_temperature", dev, dt)
    q, k, v = r(2, 3, 13, 16), r(2, 3, 13, 16), r(2, 3, 13, 16)
    outs = []
    for sh in ((3, 1, 1), (2, 1, 13, 1), (1,)):
        t = r(*sh).abs() + 0.3
        outs += [
            {"fn": lambda q, k, v, t: (q @ k.transpose(-2, -1) * t).softmax(-1) @ v, "calls": [(q, k, v, t)]},
            {
                "fn": lambda q, k, v, t: ((q @ k.transpose(-2, -1)) / t).softmax(dim=-1).matmul(v),
                "calls": [(q, k, v, t)],
                "diff": (),
            },
        ]
    return outs


@case(
    "mask_plus_scores_commuted",
    links=["pytorch/pytorch#195782"],
    kind="spelling of the mask add",
    fuse="yes",
    symptom="'mask + scores' is not seen as 'scores + mask' (or the operands get swapped in the rewrite)",
    want="same value either way",
)
def _(dev, dt):
    r = Maker("mask_plus_scores_commuted", dev, dt)
    q, k, v, m = r(2, 2, 13, 16), r(2, 2, 13, 16), r(2, 2, 13, 16), r(1, 1, 1, 13)

    def fn(q, k, v, m):
        return (m + (q @ k.transpose(-2, -1)) * 0.25).softmax(-1) @ v

    return [{"fn": fn, "calls": [(q, k, v, m)], "diff": (0, 1, 2)}, {"fn": fn, "calls": [(q, k, v, m)], "diff": ()}]


@case(
    "only_bias_needs_grad",
    links=["pytorch/pytorch#148476", "pytorch/pytorch#188302"],
    kind="gradient of the bias",
    fuse="either",
    symptom="q, k, v frozen, bias trained: lse was not saved, so backward crashes or gives garbage",
    want="bias gradient, summed over the dims it was broadcast along",
)
def _(dev, dt):
    r = Maker("only_bias_needs_grad", dev, dt)
    q, k, v = r(3, 2, 16, 16), r(3, 2, 20, 16), r(3, 2, 20, 16)
    outs = []
    for sh in ((3, 2, 16, 20), (1, 2, 16, 20), (16, 20), (1, 1, 1, 20)):
        b = r(*sh)
        outs.append({"fn": lambda q, k, v, b: sdpa(q, k, v, attn_mask=b), "calls": [(q, k, v, b)], "diff": (3,)})
    outs.append({"fn": lambda q, k, v, b: attn(q, k, v, bias=b), "calls": [(q, k, v, r(2, 16, 20))], "diff": (3, 0)})
    return outs


@case(
    "bmm_3d_with_mask",
    links=["pytorch/pytorch#155792", "pytorch/pytorch#171191"],
    kind="mask dropped in the rewrite",
    fuse="yes",
    symptom="heads folded into the batch, torch.bmm, mask added through a 4-D view: the replacement loses the mask",
    want="mask applied; output view back to 4-D right",
)
def _(dev, dt):
    r = Maker("bmm_3d_with_mask", dev, dt)
    b, h, s, d = 2, 3, 10, 16
    q, k, v, m = r(b, h, s, d), r(b, h, s, d), r(b, h, s, d), r(b, 1, s, s, scale=2.0)

    def fn(q, k, v, m):
        qq, kk, vv = (t.reshape(b * h, s, d) for t in (q, k, v))
        w = torch.bmm(qq, kk.transpose(1, 2)).view(b, h, s, s) + m
        w = torch.softmax(w.view(b * h, s, s), -1)
        return torch.bmm(w, vv).view(b, h, s, d).transpose(1, 2).reshape(b, s, h * d)

    return [{"fn": fn, "calls": [(q, k, v, m)], "diff": (0, 1, 2)}, {"fn": fn, "calls": [(q, k, v, m)], "diff": ()}]
