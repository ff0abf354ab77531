"""What surrounds the op: recompiles, autograd, checkpointing, transforms, export, caches."""

from contextlib import nullcontext

import torch
import torch.nn as nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

from .book import Book
from .inputs import Maker
from .judge import by_formula
from .small import NEG, attn, close, gap

CASES = Book()
case = CASES.case


@case(
    "dynamic_lengths",
    links=["pytorch/pytorch#110322", "pytorch/pytorch#141710", "pytorch/pytorch#165506"],
    kind="dynamic shapes",
    fuse="yes",
    symptom="compiled for one length: later lengths give NaN, reuse a kernel for another shape, or recompile each time",
    want="lengths 16, 17, 40, 129, 2 through one dynamic=True function, right outputs and gradients",
)
def _(dev, dt):
    r = Maker("dynamic_lengths", dev, dt)
    calls = [tuple(r(2, 2, s, 16) for _ in range(3)) for s in (16, 17, 40, 129, 2)]
    return [
        {"fn": lambda q, k, v: sdpa(q, k, v, is_causal=True), "calls": calls, "compile": {"dynamic": True}},
        {"fn": lambda q, k, v: attn(q, k, v), "calls": calls, "compile": {"dynamic": True}},
    ]


@case(
    "no_grad_then_grad",
    links=["pytorch/pytorch#100977"],
    kind="inference graph reused for training",
    fuse="yes",
    symptom="first call under no_grad (no lse saved), second in training: gradient missing or wrong",
    want="the training call has the right gradients",
)
def _(dev, dt):
    def check(wrap):
        r = Maker("no_grad_then_grad", dev, dt)
        lin = nn.Linear(16, 48).to(dev)

        def fn(x):
            q, k, v = lin(x).chunk(3, -1)
            return attn(q, k, v)

        c, x, g = wrap(fn), r(2, 2, 12, 16), r(2, 2, 12, 16)
        with torch.no_grad():
            assert close(c(x), fn(x), 1e-5)
        for _ in range(2):
            got = torch.autograd.grad(c(x), list(lin.parameters()), g)
            exp = torch.autograd.grad(fn(x), list(lin.parameters()), g)
            for a, b in zip(got, exp, strict=True):
                assert close(a, b, 1e-5), "gradient differs"

    return {"check": check}


@case(
    "every_subset_of_requires_grad",
    links=["pytorch/pytorch#134050", "pytorch/pytorch#188302"],
    kind="some inputs frozen",
    fuse="yes",
    symptom="what backward needs was decided by the first call's requires_grad pattern",
    want="one compiled function, all seven subsets of {q, k, v} needing gradients, starting with the smallest",
)
def _(dev, dt):
    def check(wrap):
        r = Maker("every_subset_of_requires_grad", dev, dt)
        base, g = [r(1, 2, 14, 16) for _ in range(3)], r(1, 2, 14, 16)
        fn = lambda q, k, v: sdpa(q, k, v, is_causal=True)  # noqa: E731
        c = wrap(fn)
        c(*base)
        for bits in (4, 1, 2, 3, 5, 6, 7):
            a = [t.clone().requires_grad_(bool(bits >> i & 1)) for i, t in enumerate(base)]
            b = [t.clone().requires_grad_(bool(bits >> i & 1)) for i, t in enumerate(base)]
            c(*a).backward(g)
            fn(*b).backward(g)
            for x, y in zip(a, b, strict=True):
                assert (x.grad is None) == (y.grad is None), f"subset {bits}: gradient where there should be none"
                assert y.grad is None or close(x.grad, y.grad, 1e-5), f"subset {bits}: gradient differs"

    return {"check": check}


@case(
    "checkpointed_block",
    links=["pytorch/pytorch#97436", "pytorch/pytorch#161889", "pytorch/pytorch#144637"],
    kind="activation checkpointing",
    fuse="yes",
    symptom="checkpoint around (or inside) the compiled attention: error about saved tensors, or other gradients",
    want="same gradients with and without, both nestings",
)
def _(dev, dt):
    r = Maker("checkpointed_block", dev, dt)
    q, k, v = r(1, 2, 20, 16), r(1, 2, 20, 16), r(1, 2, 20, 16)
    body = lambda q, k, v: sdpa(torch.sin(q), k, v * 1.5, is_causal=True)  # noqa: E731

    def inside(q, k, v):
        return checkpoint(body, q, k, v, use_reentrant=False)

    def outside(wrap):
        c = wrap(body)
        a = [t.clone().requires_grad_() for t in (q, k, v)]
        b = [t.clone().requires_grad_() for t in (q, k, v)]
        checkpoint(c, *a, use_reentrant=False).sum().backward()
        body(*b).sum().backward()
        for x, y in zip(a, b, strict=True):
            assert close(x.grad, y.grad, 1e-5), "gradient differs under checkpoint"

    return [{"fn": inside, "ref": body, "calls": [(q, k, v)]}, {"check": outside}]


@case(
    "constants_and_the_compile_cache",
    links=["pytorch/pytorch#144344", "pytorch/pytorch#187830"],
    kind="stale compiled artefact",
    fuse="yes",
    symptom="two graphs that differ only in a constant (scale, window, cap) share a cache entry",
    want="fresh dynamo state, caches on: each constant gives its own value",
)
def _(dev, dt):
    def check(wrap):
        r = Maker("constants_and_the_compile_cache", dev, dt)
        s = 23
        q, k, v = r(1, 2, s, 16), r(1, 2, s, 16), r(1, 2, s, 16)

        def make(scale, w, cap):
            def fn(q, k, v):
                d = gap(s, s, q.device)
                sc = cap * torch.tanh(q @ k.transpose(-1, -2) * scale / cap)
                return sc.masked_fill(~((d >= 0) & (d < w)), NEG).softmax(-1) @ v

            return fn

        for c in ((0.25, 5, 4.0), (0.5, 5, 4.0), (0.25, 6, 4.0), (0.25, 5, 3.0), (0.25, 5, 4.0)):
            torch._dynamo.reset()
            fn = make(*c)
            a = [t.clone().requires_grad_() for t in (q, k, v)]
            b = [t.clone().requires_grad_() for t in (q, k, v)]
            x, y = wrap(fn)(*a), fn(*b)
            x.sum().backward()
            y.sum().backward()
            assert close(x, y, 1e-5), f"constants {c}: output of another graph?"
            for m, n in zip(a, b, strict=True):
                assert close(m.grad, n.grad, 1e-5), f"constants {c}: gradient of another graph?"

    return {"check": check}


@case(
    "vmap_and_func_grad",
    links=["pytorch/pytorch#181177", "pytorch/pytorch#191085"],
    kind="functorch transforms",
    fuse="either",
    symptom="torch.func.grad or vmap over attention inside the compiled function: crash or a dropped backward",
    want="equal to the loop / to ordinary autograd",
)
def _(dev, dt):
    r = Maker("vmap_and_func_grad", dev, dt)
    q, k, v = r(3, 2, 2, 9, 16), r(2, 2, 9, 16), r(2, 2, 9, 16)

    def mapped(q, k, v):
        return torch.func.vmap(lambda a: attn(a, k, v))(q)

    def graded(q, k, v):
        return torch.func.grad(lambda a: (attn(a, k, v) ** 2).sum())(q)

    return [
        {
            "fn": mapped,
            "ref": lambda q, k, v: torch.stack([attn(a, k, v) for a in q]),
            "calls": [(q, k, v)],
            "diff": (),
        },
        {"fn": graded, "calls": [(q[0], k, v)], "diff": ()},
    ]


@case(
    "double_backward_right_or_loud",
    links=["pytorch/pytorch#116350", "huggingface/diffusers#5678"],
    kind="double backward",
    fuse="either",
    symptom="gradient penalty through attention: no second derivative",
    want="either the right second-order gradient or an exception; never a silent zero",
)
def _(dev, dt):
    def check(wrap):
        r = Maker("double_backward_right_or_loud", dev, dt)
        base = [r(1, 2, 8, 8) for _ in range(3)]

        def penalty(fn, args):
            (g,) = torch.autograd.grad(fn(*args).pow(2).sum(), args[0], create_graph=True)
            g.pow(2).sum().backward()
            return [t.grad for t in args]

        for fn in (lambda q, k, v: attn(q, k, v), lambda q, k, v: sdpa(q, k, v)):
            a, b = [[t.clone().requires_grad_() for t in base] for _ in range(2)]
            try:
                got = penalty(wrap(fn), a)
            except Exception:
                continue
            exp = penalty(lambda q, k, v: attn(q, k, v), b)
            for x, y in zip(got, exp, strict=True):
                assert x is not None and close(x, y, 1e-4), "silently wrong second-order gradient"

    return {"check": check}


@case(
    "exported_then_run",
    links=["pytorch/pytorch#110563", "pytorch/pytorch#177495"],
    kind="torch.export",
    fuse="either",
    symptom="export with a dynamic length specialises, or loses the mask, or the exported graph cannot be compiled",
    want="export once with dynamic length, compile the module, three lengths",
)
def _(dev, dt):
    def check(wrap):
        r = Maker("exported_then_run", dev, dt)

        class M(nn.Module):
            def forward(self, q, k, v, m):
                return sdpa(q, k, v, attn_mask=m), attn(q, k, v, mask=m)

        def inputs(s):
            keep = r.coin(1, 1, s, s)
            keep[..., 0] = True
            return r(1, 2, s, 16), r(1, 2, s, 16), r(1, 2, s, 16), keep

        n = torch.export.Dim("n", min=2, max=512)
        # What pads the mask for a GPU's kernels compares lengths: torch.export calls that a constraint.
        with by_formula() if dev == "cuda" else nullcontext():
            ep = torch.export.export(M(), inputs(20), dynamic_shapes=[{2: n}, {2: n}, {2: n}, {2: n, 3: n}])
        c = wrap(ep.module())
        for s in (20, 33, 7):
            a = inputs(s)
            for x, y in zip(c(*a), M()(*a), strict=True):
                assert close(x, y, 1e-5), f"length {s} differs"

    return {"check": check}
