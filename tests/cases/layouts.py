"""Strides, grouped heads, slices, and the layouts of results."""

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from .book import Book
from .inputs import Maker, relayout
from .small import attn

CASES = Book()
case = CASES.case
BOTH = ("fp32", "bf16")


@case(
    "sum_backward_stride0_grad",
    links=["facebookresearch/xformers#282", "pytorch/pytorch#195813", "Dao-AILab/flash-attention#355"],
    kind="grad_out layout",
    fuse="yes",
    dtypes=BOTH,
    symptom="out.sum().backward() hands a stride-0 gradient to the kernel: wrong result or refusal",
    want="same as a materialised tensor of ones",
)
def _(dev, dt):
    r = Maker("sum_backward_stride0_grad", dev, dt)
    q, k, v = r(2, 2, 35, 16), r(2, 2, 35, 16), r(2, 2, 35, 16)
    return [
        {"fn": lambda q, k, v: sdpa(q, k, v, is_causal=True), "calls": [(q, k, v)], "gout": "sum"},
        {
            "fn": lambda q, k, v: attn(q, k, v),
            "calls": [(q, k, v)],
            "gout": lambda o: torch.arange(o.shape[-1], dtype=o.dtype, device=o.device).div(7).expand(o.shape),
        },
        {"fn": lambda q, k, v: sdpa(q, k, v), "calls": [(q, k, v)], "gout": "T"},
    ]


@case(
    "sliced_keys",
    links=["pytorch/pytorch#146377"],
    kind="input layout",
    fuse="yes",
    dtypes=BOTH,
    symptom="k, v sliced along the sequence after a call with full ones: dk is garbage",
    want="gradients for the whole k, exact zero in the cut-off part, in both calls",
)
def _(dev, dt):
    r = Maker("sliced_keys", dev, dt)
    q, k, v = r(1, 3, 64, 16), r(1, 3, 64, 16), r(1, 3, 64, 16)

    def fn(q, k, v, n):
        return sdpa(q, k[:, :, :n], v[:, :, :n])

    kk, vv = k[:, :, 5:50], v[:, :, 5:50]  # and as graph inputs with holes
    return [
        {"fn": fn, "calls": [(q, k, v, 64), (q, k, v, 41)], "diff": (0, 1, 2)},
        {"fn": lambda q, k, v: attn(q, k, v), "calls": [(q, k, v), (q, kk, vv)]},
    ]


@case(
    "mqa_expanded_kv",
    links=["pytorch/pytorch#191937", "pytorch/pytorch#191085"],
    kind="stride-0 k/v",
    fuse="yes",
    dtypes=BOTH,
    symptom="one kv head expanded (stride 0) over the query heads: wrong output for some key lengths (1 mod 32)",
    want="same as with materialised heads; dk, dv summed over the query heads",
)
def _(dev, dt):
    outs = []
    for n in (33, 65, 40):
        r = Maker(f"mqa{n}", dev, dt)
        q, k, v = r(1, 4, 20, 32), r(1, 1, n, 32), r(1, 1, n, 32)
        keep = r.coin(1, 1, 20, n, p=0.8)
        keep[..., 0] = True

        def fn(q, k, v, m, n=n):
            return sdpa(q, k.expand(1, 4, n, 32), v.expand(1, 4, n, 32), attn_mask=m)

        outs.append({"fn": fn, "calls": [(q, k, v, keep)]})
        outs.append({"fn": lambda q, k, v: attn(q, k, v), "calls": [(q, k.expand(1, 4, n, 32), v.expand(1, 4, n, 32))]})
    return outs


@case(
    "gqa_odd_groups",
    links=["pytorch/pytorch#143117", "pytorch/pytorch#151359"],
    kind="GQA group size",
    fuse="yes",
    dtypes=BOTH,
    symptom="3, 6 or 7 query heads per kv head: refused, or heads mis-assigned",
    want="query head h uses kv head h // group, in three spellings",
)
def _(dev, dt):
    outs = []
    for hk, g in ((2, 3), (1, 7), (2, 6)):
        r = Maker(f"gqa{hk}{g}", dev, dt)
        q, k, v = r(1, hk * g, 19, 16), r(1, hk, 25, 16), r(1, hk, 25, 16)

        def a(q, k, v):
            return sdpa(q, k, v, enable_gqa=True)

        def b(q, k, v, g=g):
            return attn(q, k.repeat_interleave(g, 1), v.repeat_interleave(g, 1))

        def c(q, k, v, g=g, hk=hk):
            up = lambda t: t[:, :, None].expand(-1, -1, g, -1, -1).reshape(1, hk * g, 25, 16)  # noqa: E731
            return sdpa(q, up(k), up(v))

        outs += [{"fn": f, "calls": [(q, k, v)]} for f in (a, b, c)]
    return outs


@case(
    "mixed_contiguity",
    links=["Dao-AILab/flash-attention#818"],
    kind="fake and real strides disagree",
    fuse="yes",
    symptom="q and v are transposes of [B,S,H,D], k is contiguous: gradients have other strides than promised",
    want="right gradients for every mixture of layouts, graph inputs and inside the graph",
)
def _(dev, dt):
    r = Maker("mixed_contiguity", dev, dt)
    outs = []
    base = [r(2, 3, 21, 16) for _ in range(3)]
    for bits in ((1, 0, 1), (0, 1, 0), (0, 0, 1), (1, 1, 1)):
        args = tuple(relayout(t, [0, 2, 1, 3]) if b else t for t, b in zip(base, bits, strict=True))
        outs.append({"fn": lambda q, k, v: sdpa(q, k, v), "calls": [args], "gout": "BSHD" if bits[0] else "randn"})
    return outs


@case(
    "last_dim_not_unit_stride",
    links=["pytorch/pytorch#134471", "pytorch/pytorch#151365"],
    kind="input layout",
    fuse="yes",
    symptom="the head dim is not the innermost one: assertion, or reads along the wrong axis",
    want="values count, not strides",
)
def _(dev, dt):
    r = Maker("last_dim_not_unit_stride", dev, dt)
    q, k, v = (relayout(r(2, 2, 24, 16), [0, 1, 3, 2]) for _ in range(3))
    x, w = r(2, 16, 24), r(2, 3, 16, 16, scale=0.3)

    def inner(x, w):  # channels-first features, heads from an einsum
        q, k, v = torch.einsum("bcs,hnce->nbhes", x, w).unbind(0)
        return sdpa(*(t.transpose(-1, -2) for t in (q, k, v)))

    return [
        {"fn": lambda q, k, v: attn(q, k, v), "calls": [(q, k, v)]},
        {"fn": lambda q, k, v: sdpa(q, k, v), "calls": [(q, k, v)]},
        {"fn": inner, "calls": [(x, w)]},
    ]


@case(
    "misaligned_after_aligned",
    links=["pytorch/pytorch#163083", "pytorch/pytorch#121943", "pytorch/pytorch#112771"],
    kind="alignment assumed from the first call",
    fuse="yes",
    dtypes=BOTH,
    symptom="compiled with 16-byte aligned inputs, then called with a view one element further on",
    want="right in all calls; also mask lengths 8 -> 7 -> 9",
)
def _(dev, dt):
    r = Maker("misaligned_after_aligned", dev, dt)
    buf = [r(1 + 2 * 2 * 9 * 16) for _ in range(3)]
    at = lambda o: tuple(t[o : o + 2 * 2 * 9 * 16].view(2, 2, 9, 16) for t in buf)  # noqa: E731
    b = r(2, 1, 9, 10)
    return [
        {"fn": lambda q, k, v: sdpa(q, k, v), "calls": [at(0), at(1), at(0)]},
        {
            "fn": lambda q, k, v, m: sdpa(q, k[:, :, : m.shape[-1]], v[:, :, : m.shape[-1]], attn_mask=m),
            "calls": [(*at(0), b[..., :8].contiguous()), (*at(0), b[..., 1:8]), (*at(1), b[..., :9])],
            "diff": (0, 1, 2),
            "compile": {"dynamic": True},
        },
    ]


@case(
    "output_strides_as_eager",
    links=["pytorch/pytorch#182328", "pytorch/pytorch#169778", "NVIDIA/cuEquivariance#223"],
    kind="fake and real strides disagree",
    fuse="yes",
    symptom="the real output's strides differ from the fake one's: assert_size_stride, or silently wrong views",
    want="visible output strides equal eager's, and transpose(1,2).reshape / flatten behind it is right",
)
def _(dev, dt):
    r = Maker("output_strides_as_eager", dev, dt)
    q, k, v = r(2, 3, 14, 16), r(2, 3, 14, 16), r(2, 3, 14, 16)
    tr = tuple(relayout(t, [0, 2, 1, 3]) for t in (q, k, v))

    def merged(q, k, v):
        return sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    return [
        {"fn": lambda q, k, v: sdpa(q, k, v), "calls": [(q, k, v), tr], "strides": True},
        {"fn": lambda q, k, v: attn(q, k, v), "calls": [(q, k, v)], "strides": True},
        {"fn": merged, "calls": [(q, k, v), tr]},
    ]


@case(
    "projection_chain",
    links=["pytorch/pytorch#134888", "intel/torch-xpu-ops#5433", "pytorch/pytorch#143579"],
    kind="fake and real strides disagree in backward",
    fuse="yes",
    dtypes=BOTH,
    symptom="backward of the head split does .view on dq/dk/dv: fails or scrambles if their strides differ",
    want="weight gradients of a whole qkv-project / attend / out-project block",
)
def _(dev, dt):
    r = Maker("projection_chain", dev, dt)
    b, s, h, d = 2, 27, 3, 8
    x, wi, wo = r(b, s, h * d), r(h * d, 3 * h * d, scale=0.3), r(h * d, h * d, scale=0.3)

    def split(x, wi, wo):
        q, k, v = (x @ wi).split(h * d, -1)
        q, k, v = (t.view(b, s, h, d).transpose(1, 2) for t in (q, k, v))
        return sdpa(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h * d) @ wo

    def chunk(x, wi, wo):
        q, k, v = (x @ wi).view(b, s, 3, h, d).permute(2, 0, 3, 1, 4)
        return attn(q, k, v).permute(0, 2, 1, 3).reshape(b, s, -1) @ wo

    return [{"fn": f, "calls": [(x, wi, wo)], "gout": g} for f in (split, chunk) for g in ("randn", "sum")]
