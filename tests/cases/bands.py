"""Causal masks, windows and softcap."""

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from .book import Book
from .inputs import Maker
from .small import NEG, attn, gap

CASES = Book()
case = CASES.case
BOTH = ("fp32", "bf16")


@case(
    "window_edge_conventions",
    links=["huggingface/transformers#39408", "huggingface/transformers#29623", "vllm-project/vllm#3385"],
    kind="window off by one",
    fuse="yes",
    symptom="a window of W sees W+1 keys (or W-1): 'gap < W' read as 'gap <= W'",
    want="both spellings at once, each against float64, W around tile edges",
)
def _(dev, dt):
    r = Maker("window_edge_conventions", dev, dt)
    s = 70
    q, k, v = r(1, 2, s, 16), r(1, 2, s, 16), r(1, 2, s, 16)
    out = []
    for w in (1, 2, 16, 17, 63, 64):

        def fn(q, k, v, w=w):
            d = gap(s, s, q.device)
            return attn(q, k, v, mask=(d >= 0) & (d < w)), attn(q, k, v, mask=(d >= 0) & (d <= w))

        out.append({"fn": fn, "calls": [(q, k, v)]})
    return out


@case(
    "window_two_sided_uneven",
    links=["Dao-AILab/flash-attention#1133"],
    kind="window off by one",
    fuse="yes",
    dtypes=BOTH,
    symptom="left and right reach mixed up, or the far edge off by one",
    want="keys i-3 .. i+5 inclusive",
)
def _(dev, dt):
    r = Maker("window_two_sided_uneven", dev, dt)
    s = 83
    q, k, v = r(1, 2, s, 16), r(1, 2, s, 16), r(1, 2, s, 16)

    def fn(q, k, v):
        d = gap(s, s, q.device)
        return attn(q, k, v, mask=(d <= 3) & (d >= -5))

    return {"fn": fn, "calls": [(q, k, v)]}


@case(
    "is_causal_unequal_lengths",
    links=["pytorch/pytorch#103082", "pytorch/pytorch#108108", "ml-explore/mlx#2835"],
    kind="causal alignment",
    fuse="yes",
    dtypes=BOTH,
    symptom="is_causal with Lq != Lk aligned bottom-right instead of top-left",
    want="query i sees keys 0..i, whatever Lk is",
)
def _(dev, dt):
    out = []
    for lq, lk in ((5, 40), (40, 5), (17, 16), (1, 9), (65, 130)):
        r = Maker(f"is_causal{lq}{lk}", dev, dt)
        q, k, v = r(2, 2, lq, 16), r(2, 2, lk, 16), r(2, 2, lk, 16)
        out.append(
            {
                "fn": lambda q, k, v: sdpa(q, k, v, is_causal=True),
                "ref": lambda q, k, v: attn(q, k, v, mask=gap(q.shape[-2], k.shape[-2], q.device) >= 0),
                "calls": [(q, k, v)],
            }
        )
    return out


@case(
    "unreached_keys_zero_grad",
    links=["Dao-AILab/flash-attention#2568", "XunhaoLai/native-sparse-attention-triton#27"],
    kind="gradient buffers never written",
    fuse="yes",
    symptom="dk/dv of keys that no query reaches are leftovers of an uninitialised buffer",
    want="exactly 0 there, also in the tiles the backward never visits",
)
def _(dev, dt):
    r = Maker("unreached_keys_zero_grad", dev, dt)
    q, k, v = r(2, 2, 7, 16), r(2, 2, 300, 16), r(2, 2, 300, 16)

    def post(outs, grads, args):
        junk = torch.full((2, 2, 300, 16), 7e5, device=args[0].device)  # dirty the allocator for the next call
        del junk
        assert (grads[1][:, :, 7:] == 0).all() and (grads[2][:, :, 7:] == 0).all(), "unreached keys have gradient"

    return {"fn": lambda q, k, v: sdpa(q, k, v, is_causal=True), "calls": [(q, k, v), (q, k, v)], "post": post}


@case(
    "bottom_right_causal_grads",
    links=["xlite-dev/ffpa-attn#300", "Dao-AILab/flash-attention#402"],
    kind="causal alignment in backward",
    fuse="yes",
    dtypes=BOTH,
    symptom="forward offsets the diagonal by Lk - Lq, backward does not: wrong or NaN gradients",
    want="hand-written tril(diagonal=Lk-Lq): float64 outputs and gradients",
)
def _(dev, dt):
    out = []
    for lq, lk in ((6, 50), (33, 100), (1, 20)):
        r = Maker(f"bottom_right{lq}", dev, dt)
        q, k, v = r(1, 4, lq, 16), r(1, 2, lk, 16), r(1, 2, lk, 16)

        def fn(q, k, v, lq=lq, lk=lk):
            keep = torch.ones(lq, lk, dtype=torch.bool, device=q.device).tril(lk - lq)
            return sdpa(q, k, v, attn_mask=keep, enable_gqa=True)

        out.append({"fn": fn, "calls": [(q, k, v)]})
    return out


@case(
    "causal_flag_reaches_backward",
    links=["triton-lang/triton#5660", "triton-lang/triton#7216", "triton-lang/triton#4541"],
    kind="flag ignored in backward",
    fuse="yes",
    dtypes=BOTH,
    symptom="forward honours causal=False, backward masks (or skips tiles) as if causal",
    want="one compiled function, flag True, then False, then True: outputs and gradients right each time",
)
def _(dev, dt):
    r = Maker("causal_flag_reaches_backward", dev, dt)
    q, k, v = r(1, 2, 90, 16), r(1, 2, 90, 16), r(1, 2, 90, 16)
    return {
        "fn": lambda q, k, v, c: sdpa(q, k, v, is_causal=c),
        "calls": [(q, k, v, True), (q, k, v, False), (q, k, v, True)],
        "diff": (0, 1, 2),
    }


@case(
    "symbolic_is_causal",
    links=["huggingface/transformers#36374"],
    kind="symbolic bool / decode step",
    fuse="either",
    symptom="is_causal = (Lq > 1) becomes a SymBool under dynamic shapes: crash, or frozen at its first value",
    want="prefill lengths and the one-token step through one compiled function",
)
def _(dev, dt):
    r = Maker("symbolic_is_causal", dev, dt)
    calls = []
    for s in (8, 5, 1, 13):
        calls.append((r(1, 2, s, 16), r(1, 2, 13, 16), r(1, 2, 13, 16)))

    def fn(q, k, v):
        return sdpa(q, k, v, is_causal=True if q.shape[-2] > 1 else False)  # noqa: SIM210 - branches, so no SymBool

    return {"fn": fn, "calls": calls}


@case(
    "window_from_symbolic_length",
    links=["pytorch/pytorch#136914"],
    kind="SymInt in the window",
    fuse="either",
    symptom="a window computed from the (dynamic) length crashes the lowering or is frozen at the first length",
    want="W = S // 3 is right for every length",
)
def _(dev, dt):
    r = Maker("window_from_symbolic_length", dev, dt)

    def fn(q, k, v):
        s = q.shape[-2]
        d = gap(s, s, q.device)
        return attn(q, k, v, mask=(d >= 0) & (d < s // 3))

    return {
        "fn": fn,
        "calls": [tuple(r(1, 2, s, 16) for _ in range(3)) for s in (12, 20, 33, 7)],
        "compile": {"dynamic": True},
    }


@case(
    "two_layers_two_settings",
    links=["huggingface/transformers#35691", "vllm-project/vllm#5908"],
    kind="settings of one attention used for another",
    fuse="either",
    symptom="alternating local/global layers with a softcap in one graph: one layer's constants used for both",
    want="layer 1: window 4, cap 5, scale 1/8; layer 2: global causal, cap 9, scale 1/4",
)
def _(dev, dt):
    r = Maker("two_layers_two_settings", dev, dt)
    s, d = 29, 16
    x, w = r(2, s, 2 * d), [r(2 * d, 6 * d, scale=0.3) for _ in range(2)]

    def layer(x, w, window, cap, scale):
        b = x.shape[0]
        q, k, v = (x @ w).view(b, s, 3, 2, d).permute(2, 0, 3, 1, 4).unbind(0)
        dd = gap(s, s, x.device)
        keep = (dd >= 0) if window is None else (dd >= 0) & (dd < window)
        sc = cap * torch.tanh(q @ k.transpose(-1, -2) * scale / cap)
        o = sc.masked_fill(~keep, NEG).softmax(-1) @ v
        return x + o.transpose(1, 2).reshape(b, s, 2 * d)

    def fn(x, w1, w2):
        return layer(layer(x, w1, 4, 5.0, 0.125), w2, None, 9.0, 0.25)

    return {"fn": fn, "calls": [(x, *w)]}


@case(
    "softcap_gradient",
    links=["Dao-AILab/flash-attention#1033", "Dao-AILab/flash-attention#2402"],
    kind="softcap formula and its derivative",
    fuse="yes",
    dtypes=BOTH,
    symptom="cap*tanh(s/cap) computed as s*tanh(s), or 1 - tanh^2 missing from dS (or reconstructed from exp'd values)",
    want="float64 outputs and gradients with logits well inside the bend (|s| ~ cap)",
)
def _(dev, dt):
    r = Maker("softcap_gradient", dev, dt)
    q, k, v = r(1, 2, 45, 16, scale=2.0), r(1, 2, 45, 16, scale=2.0), r(1, 2, 45, 16)

    def fn(q, k, v):
        s = q @ k.transpose(-2, -1) * 0.25
        s = 6.0 * torch.tanh(s / 6.0)
        keep = gap(45, 45, q.device) >= 0
        return s.masked_fill(~keep, NEG).softmax(-1) @ v

    return {"fn": fn, "calls": [(q, k, v)]}


@case(
    "softcap_after_additive_mask",
    links=["openxla/tokamax#1121", "vllm-project/vllm-metal#665"],
    kind="order of mask and softcap",
    fuse="no",
    symptom="mask added BEFORE the cap is moved behind it",
    want="tanh squashes the mask too: a 'masked' key has score -cap, not -inf, and still gets weight",
)
def _(dev, dt):
    r = Maker("softcap_after_additive_mask", dev, dt)
    s = 24
    q, k, v = r(1, 2, s, 16), r(1, 2, s, 16), r(1, 2, s, 16)

    def fn(q, k, v):
        d = gap(s, s, q.device)
        bias = torch.zeros(s, s, device=q.device, dtype=q.dtype).masked_fill(d < 0, -1e4)
        sc = q @ k.transpose(-2, -1) * 0.25 + bias
        return (3.0 * torch.tanh(sc / 3.0)).softmax(-1) @ v

    return {"fn": fn, "calls": [(q, k, v)]}


@case(
    "scale_nonpositive_under_causal",
    links=["NVIDIA/cudnn-frontend#804", "pytorch/pytorch#105202"],
    kind="sign of the scale",
    fuse="yes",
    symptom="-inf written BEFORE scores are multiplied by the scale: 0 gives NaN, a negative scale gives +inf",
    want="scale 0: mean of the visible v; scale -2: float64",
    stock={
        "eager": "stock torch 2.13 CPU SDPA returns NaN for is_causal with scale <= 0",
        "compile": "stock torch 2.13 CPU SDPA returns NaN for is_causal with scale <= 0",
    },
)
def _(dev, dt):
    r = Maker("scale_nonpositive_under_causal", dev, dt)
    q, k, v = r(1, 2, 37, 16), r(1, 2, 37, 16), r(1, 2, 37, 16)
    return [
        {
            "fn": lambda q, k, v, s=s: sdpa(q, k, v, is_causal=True, scale=s),
            "calls": [(q, k, v)],
            "ref": lambda q, k, v, s=s: attn(q, k, v, s, gap(37, 37, q.device) >= 0),
        }
        for s in (0.0, -2.0)
    ]
