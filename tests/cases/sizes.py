"""Head dims, lengths, dtypes, and limits of kernels."""

import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention as sdpa

from .book import Book
from .inputs import Maker
from .small import attn, close, gap

CASES = Book()
case = CASES.case
BOTH = ("fp32", "bf16")


@case(
    "head_dims_not_nice",
    links=["pytorch/pytorch#182766", "Dao-AILab/flash-attention#2896", "triton-lang/triton#621"],
    kind="head dim padded to a tile",
    fuse="yes",
    dtypes=BOTH,
    symptom="72, 80, 96, 33: dq tail stale, only the first 64 channels used, crash, or 1/sqrt of the PADDED width",
    want="default scale is 1/sqrt(real head dim); every channel of dq, dk, dv right",
)
def _(dev, dt):
    outs = []
    for d in (72, 80, 96, 33, 20):
        r = Maker(f"hd{d}", dev, dt)
        q, k, v = r(1, 2, 40, d), r(1, 2, 40, d), r(1, 2, 40, d)
        outs.append({"fn": lambda q, k, v: sdpa(q, k, v, is_causal=True), "calls": [(q, k, v)]})
    return outs


@case(
    "value_wider_than_key",
    links=["pytorch/pytorch#110832", "pytorch/pytorch#133674", "XunhaoLai/native-sparse-attention-triton#27"],
    kind="different head dims of qk and v",
    fuse="either",
    dtypes=BOTH,
    symptom="dv gets k's shape; or v's channels beyond the qk width are ignored in dq",
    want="Dv = 3*Dk and Dv = Dk + 8, with gradients",
)
def _(dev, dt):
    outs = []
    for dk, dv in ((8, 24), (16, 24)):
        r = Maker(f"vw{dv}", dev, dt)
        q, k, v = r(2, 2, 18, dk), r(2, 2, 30, dk), r(2, 2, 30, dv)
        outs += [
            {"fn": lambda q, k, v: sdpa(q, k, v), "calls": [(q, k, v)]},
            {"fn": lambda q, k, v: attn(q, k, v), "calls": [(q, k, v)]},
        ]
    return outs


@case(
    "ragged_lengths_many_heads",
    links=["flagos-ai/FlagGems#898", "triton-lang/triton#2059", "meta-pytorch/attention-gym#50"],
    kind="sequence length not a multiple of the tile",
    fuse="yes",
    dtypes=BOTH,
    symptom="head 0 right, the first tokens of every further head wrong: the tail tile writes into the next head",
    want="all heads and both batches, lengths around 16, 32, 64, 128",
)
def _(dev, dt):
    outs = []
    for s in (1, 2, 15, 17, 63, 65, 100, 129):
        r = Maker(f"rl{s}", dev, dt)
        q, k, v = r(2, 3, s, 16), r(2, 3, s, 16), r(2, 3, s, 16)
        c = s % 2 == 1
        outs.append({"fn": lambda q, k, v, c=c: sdpa(q, k, v, is_causal=c), "calls": [(q, k, v)]})
    return outs


@case(
    "fp32_is_fp32",
    links=["triton-lang/triton#1671", "triton-lang/triton#8654", "triton-lang/triton#1821"],
    kind="TF32 by default in tl.dot",
    fuse="yes",
    symptom="fp32 inputs are multiplied in TF32: three digits instead of six",
    want="with torch.get_float32_matmul_precision() == 'highest' the result is good to fp32 (peaked softmax, |s| ~ 40)",
)
def _(dev, dt):
    r = Maker("fp32_is_fp32", dev, dt)
    q, k, v = r(1, 2, 64, 64, scale=2.3), r(1, 2, 64, 64, scale=2.3), r(1, 2, 64, 64)
    return [
        {"fn": lambda q, k, v: sdpa(q, k, v, is_causal=True), "calls": [(q, k, v)], "floor": 1e-4},
        {"fn": lambda q, k, v: attn(q, k, v), "calls": [(q, k, v)], "floor": 1e-4},
    ]


@case(
    "autocast_sdpa",
    links=["huggingface/diffusers#14104", "pytorch/pytorch#103167", "bghira/SimpleTuner#3002"],
    kind="autocast",
    fuse="either",
    symptom="q, k normalised to fp32 and v in bf16 under autocast: dtype error, or wrong output dtype",
    want="bf16 output; fp32 gradients at the fp32 leaves",
)
def _(dev, dt):
    r = Maker("autocast_sdpa", dev, dt)
    x, w = r(2, 17, 32), r(32, 96, scale=0.3)

    def fn(x, w):
        q, k, v = (x @ w).view(2, 17, 3, 2, 16).permute(2, 0, 3, 1, 4)
        q, k = (F.rms_norm(t.float(), (16,)) for t in (q, k))
        return sdpa(q, k, v, is_causal=True)

    def ref(x, w):
        q, k, v = (x @ w).view(2, 17, 3, 2, 16).permute(2, 0, 3, 1, 4)
        q, k = (F.rms_norm(t, (16,), eps=1e-7) for t in (q, k))
        return attn(q, k, v, mask=gap(17, 17, q.device) >= 0)

    return {"fn": fn, "ref": ref, "calls": [(x, w)], "ctx": lambda: torch.autocast(dev, torch.bfloat16), "floor": 3e-2}


@case(
    "float64_stays_float64",
    links=["pytorch/pytorch#171191"],
    kind="float64 computed in lower precision",
    fuse="either",
    dtypes=("fp64",),
    symptom="double inputs run through an fp32 accumulator",
    want="1e-9 relative, outputs and gradients; or do not fuse",
)
def _(dev, dt):
    r = Maker("float64_stays_float64", dev, dt)
    q, k, v = r(1, 2, 13, 16), r(1, 2, 13, 16), r(1, 2, 13, 16)
    return [
        {"fn": lambda q, k, v: sdpa(q, k, v, is_causal=True), "calls": [(q, k, v)]},
        {"fn": lambda q, k, v: attn(q, k, v), "calls": [(q, k, v)]},
    ]


@case(
    "empty_sizes",
    links=[
        "pytorch/pytorch#165944",
        "pytorch/pytorch#195812",
        "pytorch/pytorch#175063",
        "Dao-AILab/flash-attention#1159",
    ],
    kind="size 0",
    fuse="either",
    symptom="batch 0, no queries or no keys: launch error, division by zero, or gradient None",
    want="empty (or zero) output and empty (or zero) gradients of the right shape",
)
def _(dev, dt):
    outs = []
    for b, lq, lk in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        r = Maker("empty", dev, dt)
        q, k, v = r(b, 2, lq, 16), r(b, 2, lk, 16), r(b, 2, lk, 16)
        outs.append({"fn": lambda q, k, v: sdpa(q, k, v) * 2.0, "calls": [(q, k, v)]})
        if lk:
            outs.append({"fn": lambda q, k, v: attn(q, k, v), "calls": [(q, k, v)]})
    return outs


@case(
    "int32_overflow_sequence_stride",
    links=["thu-ml/SageAttention#386", "fla-org/flash-linear-attention#1080", "xlite-dev/ffpa-attn#299"],
    kind="int32 offsets",
    fuse="yes",
    heavy=True,
    dtypes=("bf16",),
    symptom="offset = position * stride wraps at 2**31 when k is a view into something big: garbage, then a fault",
    want="33 rows 2**26 elements apart (4.4 GB of address space, a few pages touched): same as a compact copy",
)
def _(dev, dt):
    def check(wrap):
        r = Maker("int32_overflow_sequence_stride", dev, dt)
        n, gapsz = 34, 2**26
        kc, q, v = r(1, 1, n, 16), r(1, 1, 5, 16), r(1, 1, n, 16)
        big = torch.empty(n * gapsz, dtype=r.dt, device=dev)
        k = big.as_strided((1, 1, n, 16), (n * gapsz, n * gapsz, gapsz, 1))
        k.copy_(kc)
        c = wrap(lambda q, k, v: sdpa(q, k, v))
        q1, v1 = q.clone().requires_grad_(), v.clone().requires_grad_()
        q2, v2 = q.clone().requires_grad_(), v.clone().requires_grad_()
        a, b = c(q1, k, v1), sdpa(q2, kc, v2)
        g = r(1, 1, 5, 16)
        a.backward(g)
        b.backward(g)
        for x, y in ((a, b), (q1.grad, q2.grad), (v1.grad, v2.grad)):
            assert close(x, y, 2e-2), "differs from the compact copy"

    return {"check": check}


@case(
    "seventy_thousand_heads",
    links=[
        "pytorch/pytorch#142228",
        "pytorch/pytorch#146704",
        "facebookresearch/xformers#845",
        "Dao-AILab/flash-attention#1786",
    ],
    kind="launch grid limit",
    fuse="yes",
    symptom="batch, heads or batch*heads above 65535 on grid axis y or z: invalid configuration argument",
    want="70000 tiny attentions as batch and as heads, with gradients",
)
def _(dev, dt):
    r = Maker("seventy_thousand_heads", dev, dt)
    a = tuple(r(70000, 1, 3, 8) for _ in range(3))
    b = tuple(t.view(1, 70000, 3, 8) for t in a)
    f = lambda q, k, v: sdpa(q, k, v, is_causal=True)  # noqa: E731
    return [{"fn": f, "calls": [a]}, {"fn": f, "calls": [b], "gout": "sum"}]
