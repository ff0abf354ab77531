"""Masks, rows that see nothing, NaN, biases."""

import math

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from .book import Book
from .inputs import Maker
from .small import NEG, attn, close, gap

CASES = Book()
case = CASES.case
BOTH = ("fp32", "bf16")


@case(
    "bool_mask_empty_rows",
    links=["pytorch/pytorch#103963", "pytorch/pytorch#103749", "pytorch/pytorch#100318"],
    kind="fully masked rows",
    dtypes=BOTH,
    fuse="yes",
    symptom="rows whose boolean mask is all False come out NaN (and poison every gradient)",
    want="SDPA's contract: such rows are exactly 0 and add nothing to dq, dk, dv; all gradients finite",
)
def _(dev, dt):
    r = Maker("bool_mask_empty_rows", dev, dt)
    q, k, v = r(2, 3, 21, 16), r(2, 3, 37, 16), r(2, 3, 37, 16)
    keep = r.coin(2, 1, 21, 37, p=0.4)
    keep[0, :, 4:7] = False
    keep[1, :, 20] = False
    keep[..., 0] |= keep.any(-1)

    def post(outs, grads, args):
        dead = ~keep.any(-1)
        assert (outs[0].masked_select(dead.unsqueeze(-1)) == 0).all(), "a row without keys is not 0"
        assert (grads[0].masked_select(dead.unsqueeze(-1)) == 0).all(), "dq of a row without keys is not 0"

    return {"fn": lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), "calls": [(q, k, v, keep)], "post": post}


@case(
    "finfo_min_empty_rows",
    links=["pytorch/pytorch#109517", "pytorch/pytorch#103749", "huggingface/transformers#27114"],
    kind="fully masked rows",
    fuse="either",
    symptom="a finite 'minus infinity' (finfo.min) is treated as a real -inf, or its sums overflow to NaN",
    want="hand-written graph with finfo.min fill: a row with no kept key is the plain mean over ALL keys",
)
def _(dev, dt):
    r = Maker("finfo_min_empty_rows", dev, dt)
    q, k, v = r(1, 2, 40, 32), r(1, 2, 150, 32), r(1, 2, 150, 32)
    keep = torch.ones(1, 1, 40, 150, dtype=torch.bool, device=dev)
    keep[..., :128] = False  # the first 128 keys are dead for everybody
    keep[:, :, 11] = False  # and row 11 has none at all

    def fn(q, k, v, m):
        s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        return s.masked_fill(~m, torch.finfo(torch.float32).min).softmax(-1) @ v

    def post(outs, grads, args):
        assert close(outs[0][:, :, 11], args[2].mean(-2), 1e-4), "row 11 is not the mean of v"

    return {"fn": fn, "calls": [(q, k, v, keep)], "post": post}


@case(
    "handwritten_inf_row_stays_local",
    links=["pytorch/pytorch#41508", "NVIDIA-NeMo/Automodel#2826"],
    kind="fully masked rows",
    fuse="either",
    symptom="one fully -inf row in a hand-written softmax spoils rows that have nothing to do with it",
    want="forward only: rows with at least one key keep their value; the dead row may be NaN (eager) or 0",
)
def _(dev, dt):
    r = Maker("handwritten_inf_row_stays_local", dev, dt)
    q, k, v = r(2, 2, 33, 8), r(2, 2, 33, 8), r(2, 2, 33, 8)
    keep = gap(33, 33, dev) >= 0
    keep = keep.expand(2, 1, 33, 33).clone()
    keep[1, :, :, :5] = False  # left padding: rows 0..4 of batch 1 have no key
    live = keep.any(-1).expand(2, 2, 33)
    return {
        "fn": lambda q, k, v, m: attn(q, k, v, mask=m),
        "calls": [(q, k, v, keep)],
        "diff": (),
        "pick": lambda outs: [outs[0][live]],
    }


@case(
    "left_padding_dead_tiles",
    links=["pytorch/pytorch#109517", "pytorch/pytorch#127055"],
    kind="masked leading tiles in the online softmax",
    dtypes=BOTH,
    fuse="yes",
    symptom="NaN when the first key tiles of a row are entirely -inf: exp(-inf - (-inf))",
    want="plain float64 result, finite gradients, exact zero dk/dv for the dead keys",
)
def _(dev, dt):
    r = Maker("left_padding_dead_tiles", dev, dt)
    q, k, v = r(1, 2, 70, 24), r(1, 2, 200, 24), r(1, 2, 200, 24)
    bias = torch.zeros(1, 1, 1, 200, device=dev, dtype=q.dtype)
    bias[..., :163] = NEG

    def post(outs, grads, args):
        assert (grads[1][:, :, :163] == 0).all() and (grads[2][:, :, :163] == 0).all(), "dead keys got gradient"

    return {
        "fn": lambda q, k, v, b: sdpa(q, k, v, attn_mask=b),
        "calls": [(q, k, v, bias)],
        "diff": (0, 1, 2),
        "post": post,
    }


@case(
    "ragged_key_tail_all_scores_low",
    links=["pytorch/pytorch#159247", "pytorch/pytorch#191937"],
    kind="key length not a multiple of the tile",
    dtypes=BOTH,
    fuse="yes",
    symptom="columns past the end of k take part with score 0 instead of -inf",
    want="with every real score near -60 a stray zero score would take all the weight: must equal float64",
)
def _(dev, dt):
    out = []
    for n in (1, 17, 33, 65, 97, 129):
        r = Maker(f"ragged{n}", dev, dt)
        d = 16
        q = r(1, 2, 9, d, scale=0.2) + 4.0
        k = r(1, 2, n, d, scale=0.2) - 4.0
        v = r(1, 2, n, d)
        out.append({"fn": lambda q, k, v: attn(q, k, v), "calls": [(q, k, v)]})
        # Keys near -4 multiply what rounding dS to 16 bit costs any fused backward: SDPA's own is the measure.
        out.append({"fn": lambda q, k, v: sdpa(q, k, v), "calls": [(q, k, v)], "own_kernels": True})
    return out


@case(
    "huge_logits",
    links=["pytorch/pytorch#121558", "pytorch/pytorch#119131", "pytorch/pytorch#116176"],
    kind="overflow of large logits",
    dtypes=("bf16", "fp16"),
    fuse="yes",
    symptom="NaN where q.k is far beyond the half-precision range although softmax itself is well defined",
    want="equal keys give the mean of v; distinct keys give the argmax's v; nothing is NaN",
)
def _(dev, dt):
    r = Maker("huge_logits", dev, dt)
    fn = lambda q, k, v: sdpa(q, k, v)  # noqa: E731
    outs = []
    for big, diff in ((60000.0 if dt == "bf16" else 200.0, ()), (60.0, (2,))):
        # backward only for the moderate size: at 1e10 an fp32 log-sum-exp swallows log(row sum),
        # and stock CPU SDPA's own dv is then off by the number of tied keys
        q = torch.full((1, 1, 3, 64), big, dtype=r.dt, device=dev)
        k = torch.full((1, 1, 5, 64), big, dtype=r.dt, device=dev)
        v = r(1, 1, 5, 64)
        k2 = k * torch.tensor([1.0, 0.5, -1.0, 0.25, -0.5], dtype=r.dt, device=dev).view(1, 1, 5, 1)
        outs.append({"fn": fn, "calls": [(q, k, v), (q, k2, v)], "diff": diff})
    return outs


@case(
    "nan_in_masked_key",
    links=["pytorch/pytorch#101967"],
    kind="NaN leaking from masked positions",
    fuse="yes",
    symptom="a NaN in a key that the mask removes still turns outputs into NaN",
    want="masked_fill replaces that score, so the forward is finite and equals the result without the key",
)
def _(dev, dt):
    r = Maker("nan_in_masked_key", dev, dt)
    q, k, v = r(1, 2, 10, 16), r(1, 2, 20, 16), r(1, 2, 20, 16)
    k[:, :, 13, 3] = float("nan")
    keep = torch.ones(20, dtype=torch.bool, device=dev)
    keep[13] = False

    def ref(q, k, v, m):
        return attn(q, k[:, :, m], v[:, :, m])

    return {"fn": lambda q, k, v, m: attn(q, k, v, mask=m), "ref": ref, "calls": [(q, k, v, keep)], "diff": ()}


@case(
    "alibi_bias_under_causal",
    links=["pytorch/pytorch#153799"],
    kind="score bias together with a mask",
    dtypes=BOTH,
    fuse="either",
    symptom="NaN gradient when a distance bias, huge at masked (future) positions, meets the mask and a ragged tail",
    want="float64 result; per-head slopes, bias grows at the masked side; dq, dk, dv finite",
)
def _(dev, dt):
    r = Maker("alibi_bias_under_causal", dev, dt)
    s = 131
    q, k, v = r(1, 3, s, 16), r(1, 3, s, 16), r(1, 3, s, 16)
    slope = torch.tensor([0.5, 0.25, 2.0], device=dev).view(3, 1, 1).to(r.dt)

    def fn(q, k, v, slope):
        d = gap(s, s, q.device)
        w = q @ k.transpose(-2, -1) * 0.25 - slope * d.to(q.dtype)
        w = w.masked_fill(d < 0, NEG)
        return torch.softmax(w.float(), -1).to(q.dtype) @ v

    def ref(q, k, v, slope):
        d = gap(s, s, q.device)
        return attn(q, k, v, 0.25, d >= 0, -slope * d)

    return {"fn": fn, "ref": ref, "calls": [(q, k, v, slope)], "diff": (0, 1, 2)}


@case(
    "mask_broadcast_shapes",
    links=["pytorch/pytorch#120810", "torch-spyre/torch-spyre#4526", "pytorch/pytorch#155792"],
    kind="mask broadcasting / mask dropped",
    fuse="either",
    symptom="a mask of lower rank is misread, or vanishes in the rewrite",
    want="standard broadcasting against [B, H, Lq, Lk] for every shape, float and bool",
)
def _(dev, dt):
    r = Maker("mask_broadcast_shapes", dev, dt)
    b, h, lq, lk = 2, 3, 6, 10
    q, k, v = r(b, h, lq, 8), r(b, h, lk, 8), r(b, h, lk, 8)
    shapes = [(lk,), (lq, lk), (1, lk), (b, 1, 1, lk), (1, h, 1, lk), (h, lq, lk), (b, h, lq, lk), (b, 1, lq, lk)]
    out = []
    for sh in shapes:
        bias, keep = r(*sh, scale=2.0), r.coin(*sh, p=0.7)
        keep[..., 0] = True
        if len(sh) > 1:  # SDPA itself wants rank 2 or more
            out.append(
                {"fn": lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), "calls": [(q, k, v, bias)], "diff": (0, 1, 2)}
            )
        if len(sh) != 3:
            out.append(
                {
                    "fn": lambda q, k, v, m, b: attn(q, k, v, mask=m, bias=b),
                    "calls": [(q, k, v, keep, bias)],
                    "diff": (0, 1, 2),
                }
            )
    return out


@case(
    "bool_added_is_not_a_mask",
    links=["pytorch/pytorch#195412"],
    kind="mask semantics guessed from the dtype",
    fuse="no",
    symptom="a bool tensor that is ADDED to the scores is taken for a keep-mask",
    want="scores + True adds 1.0; nothing is masked",
)
def _(dev, dt):
    r = Maker("bool_added_is_not_a_mask", dev, dt)
    q, k, v = r(2, 2, 12, 16), r(2, 2, 12, 16), r(2, 2, 12, 16)
    tri = torch.ones(12, 12, dtype=torch.bool, device=dev).tril()

    def fn(q, k, v, tri):
        return ((q @ k.transpose(-2, -1)) * 0.25 + tri).softmax(-1) @ v

    return {"fn": fn, "calls": [(q, k, v, tri)]}


@case(
    "fp32_mask_with_half_qkv",
    links=["pytorch/pytorch#195784", "pytorch/pytorch#161936"],
    kind="mask dtype differs from q/k/v",
    dtypes=("bf16",),
    fuse="either",
    symptom="dtype error in the replacement, or mask values rounded to half first",
    want="scores promote to fp32 by the add; softmax in fp32; cast back before the product with v",
)
def _(dev, dt):
    r = Maker("fp32_mask_with_half_qkv", dev, dt)
    q, k, v = r(2, 2, 19, 16), r(2, 2, 23, 16), r(2, 2, 23, 16)
    bias = r(2, 1, 19, 23, dtype=torch.float32) + 100.0 + torch.rand(1, 1, 1, 23, device=dev) * 0.2

    def fn(q, k, v, b):
        s = q @ k.transpose(-2, -1) * 0.25 + b
        return s.softmax(-1).to(v.dtype) @ v

    return {"fn": fn, "calls": [(q, k, v, bias)], "diff": (0, 1, 2)}


@case(
    "mask_all_true_then_real",
    links=["huggingface/transformers#44202", "huggingface/transformers#32613", "pytorch/pytorch#175274"],
    kind="decision taken from the first input's mask values",
    fuse="either",
    symptom="the mask is thrown away because it was all True (or exactly causal) when the graph was first built",
    want="same compiled function, second call with another mask: the second mask counts",
)
def _(dev, dt):
    r = Maker("mask_all_true_then_real", dev, dt)
    s = 18
    q, k, v = r(2, 2, s, 16), r(2, 2, s, 16), r(2, 2, s, 16)
    ones = torch.ones(2, 1, s, s, dtype=torch.bool, device=dev)
    tri = ones.tril()
    odd = r.coin(2, 1, s, s)
    odd[..., 3] = True
    return {
        "fn": lambda q, k, v, m: attn(q, k, v, mask=m),
        "calls": [(q, k, v, ones), (q, k, v, tri), (q, k, v, odd)],
        "diff": (0, 1, 2),
    }


@case(
    "packed_documents",
    links=["pytorch/pytorch#186775", "Dao-AILab/flash-attention#436"],
    kind="causal lookalike",
    fuse="either",
    symptom="causal-within-document mask, documents differing per sample and per call, reduced to causal",
    want="the mask as written; document borders inside tiles",
)
def _(dev, dt):
    r = Maker("packed_documents", dev, dt)
    s = 47
    q, k, v = r(2, 2, s, 16), r(2, 2, s, 16), r(2, 2, s, 16)

    def fn(q, k, v, doc):
        keep = (gap(s, s, q.device) >= 0) & (doc[:, None, :, None] == doc[:, None, None, :])
        return attn(q, k, v, mask=keep)

    d1 = torch.zeros(2, s, dtype=torch.long, device=dev)
    d2 = torch.stack([torch.arange(s, device=dev) // 11, (torch.arange(s, device=dev) > 30).long()])
    return {"fn": fn, "calls": [(q, k, v, d1), (q, k, v, d2)], "diff": (0, 1, 2)}


@case(
    "nan_inputs_stay_nan",
    links=["pytorch/pytorch#141128"],
    kind="NaN hidden by the safe softmax",
    fuse="either",
    symptom="a query full of NaN comes out as 0 (taken for a row without keys), which hides a broken model",
    want="NaN rows stay NaN, other rows are untouched",
)
def _(dev, dt):
    def check(wrap):
        r = Maker("nan_inputs_stay_nan", dev, dt)
        q, k, v = r(2, 2, 9, 16), r(2, 2, 40, 16), r(2, 2, 40, 16)
        exp = attn(q, k, v)
        q[1, :, 3] = float("nan")
        for fn in (lambda q, k, v: sdpa(q, k, v), lambda q, k, v: attn(q, k, v)):
            o = wrap(fn)(q, k, v)
            assert o[1, :, 3].isnan().all(), "NaN query gave a number"
            o[1, :, 3], e = 0, exp.clone()
            e[1, :, 3] = 0
            assert close(o, e, 1e-5), "rows without NaN changed"

    return {"check": check}
