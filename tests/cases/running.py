"""Repeated and concurrent runs, in-place writes, modules, global state."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention as sdpa

from .book import Book
from .inputs import Maker
from .small import attn, close, gap

CASES = Book()
case = CASES.case
BOTH = ("fp32", "bf16")


@case(
    "repeatable_bits",
    links=["Dao-AILab/flash-attention#429", "Dao-AILab/flash-attention#349", "pytorch/FBGEMM#4840"],
    kind="nondeterministic backward",
    fuse="yes",
    dtypes=BOTH,
    symptom="dq by atomic adds: different bits each run although deterministic algorithms were asked for",
    want="torch.use_deterministic_algorithms(True): three runs, identical bits (GQA, causal) - or an exception",
)
def _(dev, dt):
    def check(wrap):
        r = Maker("repeatable_bits", dev, dt)
        q, k, v, g = r(2, 6, 150, 16), r(2, 2, 150, 16), r(2, 2, 150, 16), r(2, 6, 150, 16)
        c = wrap(lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True))
        old = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=False)
        try:
            first = None
            for _ in range(3):
                a = [t.clone().requires_grad_() for t in (q, k, v)]
                try:
                    o = c(*a)
                    o.backward(g)
                except RuntimeError as e:
                    assert "determinis" in str(e), e
                    return
                now = [o.detach()] + [t.grad for t in a]
                first = first or now
                assert all(torch.equal(x, y) for x, y in zip(first, now, strict=True)), "bits differ between runs"
        finally:
            torch.use_deterministic_algorithms(old)

    return {"check": check}


@case(
    "reduce_overhead_accumulate",
    links=["pytorch/pytorch#97253", "pytorch/pytorch#169545"],
    kind="CUDA graphs",
    fuse="yes",
    symptom="mode='reduce-overhead': zero gradients, or results overwritten by the next replay",
    want="six iterations with fresh inputs, gradients accumulated over pairs, all equal to eager",
)
def _(dev, dt):
    def check(wrap):
        r = Maker("reduce_overhead_accumulate", dev, dt)
        w1, w2 = (r(16, 48, scale=0.3).requires_grad_() for _ in range(2))
        w2.data.copy_(w1.data)

        def fn(x, w):
            q, k, v = (x @ w).chunk(3, -1)
            return sdpa(q, k, v, is_causal=True)

        c = wrap(fn, mode="reduce-overhead")
        for it in range(6):
            x = r(2, 2, 32, 16)
            torch.compiler.cudagraph_mark_step_begin()
            c(x, w1).sum().backward()
            fn(x, w2).sum().backward()
            assert close(w1.grad, w2.grad, 1e-5), f"iteration {it}"
            w1.grad = w1.grad.clone()  # the graph's next replay overwrites its own; PyTorch asks for a copy
            if it % 2:
                w1.grad, w2.grad = None, None

    return {"check": check}


@case(
    "output_changed_in_place",
    links=["linkedin/Liger-Kernel#254"],
    kind="in-place around the op",
    fuse="yes",
    symptom="gate multiplied into the output in place, residual added in place: backward sees changed tensors",
    want="as if out of place",
)
def _(dev, dt):
    r = Maker("output_changed_in_place", dev, dt)
    x, gate = r(2, 2, 15, 16), r(2, 2, 15, 16)

    def fn(x, gate):
        q = x * 1.0
        o = sdpa(q, x, x, is_causal=True)
        o = o + 0
        o *= torch.sigmoid(gate)
        o += x
        return o

    return {"fn": fn, "calls": [(x, gate)]}


@case(
    "encoder_layer_training",
    links=["pytorch/pytorch#193966", "pytorch/pytorch#41508"],
    kind="nn.Module users",
    fuse="either",
    symptom="nn.TransformerEncoderLayer with padding, compiled: stride assertion or NaN weight gradients",
    want="training mode, dropout 0, non-contiguous input, key padding of one sample: outputs and all weight gradients",
)
def _(dev, dt):
    def check(wrap):
        r = Maker("encoder_layer_training", dev, dt)
        torch.manual_seed(5)
        m = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True).to(dev).train()
        x = r(3, 16, 11).transpose(1, 2)
        pad = torch.zeros(3, 11, dtype=torch.bool, device=dev)
        pad[1, 7:] = True
        f = lambda x, p: m(x, src_key_padding_mask=p)  # noqa: E731
        g = r(3, 11, 16) * (~pad).unsqueeze(-1)
        got = torch.autograd.grad(wrap(f)(x, pad), list(m.parameters()), g)
        exp = torch.autograd.grad(f(x, pad), list(m.parameters()), g)
        for a, b in zip(got, exp, strict=True):
            assert torch.isfinite(a).all() and close(a, b, 2e-5), "weight gradient differs"

    return {"check": check}


@case(
    "backward_leaves_arguments_alone",
    links=["linkedin/Liger-Kernel#254", "pytorch/pytorch#120950"],
    kind="in-place work in backward",
    fuse="yes",
    dtypes=BOTH,
    symptom="backward scribbles on grad_out, on its saved inputs or on the output; a second backward differs",
    want="grad_out, q, k, v, out unchanged bit for bit; retain_graph: second gradient equals the first",
)
def _(dev, dt):
    def check(wrap):
        r = Maker("backward_leaves_arguments_alone", dev, dt)
        for fn in (lambda q, k, v: sdpa(q, k, v, is_causal=True), lambda q, k, v: attn(q, k, v)):
            a = [r(1, 2, 45, 16).requires_grad_() for _ in range(3)]
            g = r(1, 2, 45, 16)
            o = wrap(fn)(*a)
            before = [t.detach().clone() for t in (*a, g, o)]
            g1 = [t.clone() for t in torch.autograd.grad(o, a, g, retain_graph=True)]
            g2 = torch.autograd.grad(o, a, g)
            for x, y in zip((*a, g, o), before, strict=True):
                assert torch.equal(x, y), "backward changed one of its arguments"
            for x, y in zip(g1, g2, strict=True):
                assert close(x, y, 1e-5 if dt == "fp32" else 1e-2), "second backward differs"

    return {"check": check}


@case(
    "other_default_dtype",
    links=["pytorch/pytorch#119162"],
    kind="global state",
    fuse="either",
    symptom="torch.set_default_dtype changes an intermediate of the rewritten graph (mask, lse, dropout, scale)",
    want="fp32 tensors under default float64 and bf16: same values, same dtypes",
    stock={
        "compile": "stock 2.13: the sfdp rewrite of a training graph under a default dtype other than fp32 dies with "
        "IndexError in guard building; passes with the pattern matcher off"
    },
)
def _(dev, dt):
    def check(wrap):
        r = Maker("other_default_dtype", dev, dt)
        q, k, v = r(1, 2, 19, 16), r(1, 2, 19, 16), r(1, 2, 19, 16)
        old = torch.get_default_dtype()
        forms = (
            lambda q, k, v: sdpa(q, k, v, is_causal=True),
            lambda q, k, v: attn(q, k, v, mask=gap(19, 19, q.device) >= 0),
            lambda q, k, v: F.dropout((q @ k.transpose(-2, -1) / 4).softmax(-1), 0.1, False) @ v,
        )
        for d in (torch.float64, torch.bfloat16):
            for fn in forms:
                torch._dynamo.reset()
                exp = fn(q, k, v)
                try:
                    torch.set_default_dtype(d)
                    a = [t.clone().requires_grad_() for t in (q, k, v)]
                    got = wrap(fn)(*a)
                    got.sum().backward()
                finally:
                    torch.set_default_dtype(old)
                assert got.dtype == torch.float32 and close(got, exp, 1e-5), f"default {d}"
                assert all(t.grad.dtype == torch.float32 for t in a)

    return {"check": check}


@case(
    "threads_after_warmup",
    links=["triton-lang/triton#11494", "pytorch/pytorch#136833", "pytorch/pytorch#123177"],
    kind="threads",
    fuse="yes",
    symptom="two threads run compiled attention: shared scratch, a shared autotuner or a shared workspace mixes data",
    want="warmed up once, then 4 threads x 10 forward+backward with different inputs, each equal to eager",
)
def _(dev, dt):
    def check(wrap):
        import threading

        fn = lambda q, k, v: sdpa(q, k, v, is_causal=True)  # noqa: E731
        c = wrap(fn)
        r = Maker("threads_after_warmup", dev, dt)
        data = [[[r(1, 2, 64, 16) for _ in range(3)] for _ in range(10)] for _ in range(4)]

        def step(f, x):
            a = [t.clone().requires_grad_() for t in x]
            o = f(*a)
            o.sum().backward()
            return [o.detach()] + [t.grad for t in a]

        step(c, data[0][0])
        bad = []

        def work(i):
            try:
                for x in data[i]:
                    if not all(close(m, n, 1e-5) for m, n in zip(step(c, x), step(fn, x), strict=True)):
                        bad.append(f"thread {i}: differs")
            except Exception as e:
                bad.append(f"thread {i}: {e}")

        ts = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        [t.start() for t in ts]
        [t.join() for t in ts]
        assert not bad, bad[0]

    return {"check": check}


@case(
    "kv_cache_written_in_graph",
    links=["huggingface/transformers#27931"],
    kind="in-place around the op",
    fuse="either",
    symptom="a static k/v cache updated in place in the compiled step: old contents are read, or the update is lost",
    want="eight decode steps: outputs and final cache equal eager's",
)
def _(dev, dt):
    def check(wrap):
        r = Maker("kv_cache_written_in_graph", dev, dt)
        n = 12

        def fn(q, k, v, kc, vc, pos):
            kc.index_copy_(2, pos, k)
            vc.index_copy_(2, pos, v)
            keep = torch.arange(n, device=q.device)[None] <= pos[:, None]
            return sdpa(q, kc, vc, attn_mask=keep)

        c = wrap(fn)
        a, b = [[torch.zeros(1, 2, n, 16, device=dev) for _ in range(2)] for _ in range(2)]
        with torch.no_grad():
            for i in range(8):
                x = [r(1, 2, 1, 16) for _ in range(3)]
                p = torch.tensor([i], device=dev)
                got, exp = c(*x, *a, p), fn(*x, *b, p)
                assert close(got, exp, 1e-5), f"step {i}"
        assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True)), "cache contents differ"

    return {"check": check}
