"""Runs a case and says whether the answer is right.

Two forms of case
-----------------
A build function ``build(dev, dt)`` returns one dict, or a list of dicts, of form A or B.

form A (data)
    fn      callable(*args) -> Tensor or tuple of Tensors; the thing to compile
    calls   list of argument tuples; all go through the SAME compiled fn, in order
    ref     optional callable with fn's signature giving the right value; it is
            evaluated on float64 copies of the arguments (default: fn itself)
    ref_own_dtype  True: evaluate ref on copies in the arguments' own dtype instead
    diff    indices of the args that need a gradient (default: every floating one;
            () = forward only)
    gout    "randn" (default), "sum" (stride-0 ones), "T" (last two dims stored
            swapped), "BSHD" (dims 1,2 stored swapped), or callable(out) -> grad
    compile kwargs for torch.compile (dynamic=True, mode=...)
    config  dict for torch._inductor.config.patch around everything
    ctx     callable() -> context manager put around the forward
    pick    callable(list of outputs) -> list of outputs to compare
    post    callable(outs, grads, args): further asserts on the candidate's results
    strides True: the candidate's outputs must have eager's strides
    floor   override of the dtype's relative tolerance floor

form B (check)
    check   callable(wrap); raises AssertionError when the property does not hold.
            wrap(fn, **compile_kwargs) gives the candidate.

Criterion for form A, per tensor, against the float64 reference r:
    shape and dtype as eager;  finite wherever r is finite;
    max|cand - r| <= 3 * max|eager - r| + floor(dtype) * (max|r| + 0.05 * scale of the group)
(in mode eager: <= 20 * floor, which checks the reference itself).
"""

import contextlib
import math

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .inputs import clone_args

FLOOR = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float64: 1e-9}


def as_list(o):
    return [o] if isinstance(o, torch.Tensor) else [t for t in o if isinstance(t, torch.Tensor)]


def make_gout(spec, o, n):
    if callable(spec):
        return spec(o)
    if spec == "sum":
        return torch.ones((), dtype=o.dtype, device=o.device).expand(o.shape)
    g = torch.randn(o.shape, generator=torch.Generator().manual_seed(991 + n)).to(o.dtype).to(o.device)
    if spec == "T":
        g = g.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif spec == "BSHD":
        g = g.transpose(1, 2).contiguous().transpose(1, 2)
    return g


def fwd_bwd(fn, args, diff, gout, ctx):
    with ctx():
        outs = as_list(fn(*args))
    pairs = [(o, make_gout(gout, o.detach(), n)) for n, o in enumerate(outs) if o.requires_grad]
    if diff and pairs:
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    grads, seen = [], set()
    for i in diff:
        if id(args[i]) not in seen:
            seen.add(id(args[i]))
            grads.append(args[i].grad)
    return outs, grads


def worst(x, r):
    ok = torch.isfinite(r)
    if not ok.any():
        return 0.0
    d = (x.double() - r)[ok].abs()
    return float("inf") if not torch.isfinite(d).all() else d.max().item()


def compare(label, cand, eag, ref, strict_eager, floor=None, strides=False):
    scale = max(
        [1e-30] + [r[torch.isfinite(r)].abs().max().item() for r in ref if r is not None and torch.isfinite(r).any()]
    )
    assert len(cand) == len(eag) == len(ref), f"{label}: {len(cand)} results, eager {len(eag)}, ref {len(ref)}"
    for n, (c, e, r) in enumerate(zip(cand, eag, ref, strict=True)):
        at = f"{label}[{n}]"
        if e is None:
            assert c is None or c.abs().max().item() == 0, f"{at}: eager has none, candidate has one"
            continue
        assert c is not None, f"{at}: missing"
        assert c.shape == e.shape, f"{at}: shape {tuple(c.shape)} vs eager {tuple(e.shape)}"
        assert c.dtype == e.dtype, f"{at}: dtype {c.dtype} vs eager {e.dtype}"
        if strides and e.numel():
            assert c.stride() == e.stride(), f"{at}: strides {c.stride()} vs eager {e.stride()}"
        if not c.is_floating_point() or c.numel() == 0:
            if c.numel():
                assert torch.equal(c, e), f"{at}: differs from eager"
            continue
        r = r.to(c.device).double()
        top = r[torch.isfinite(r)].abs().max().item() if torch.isfinite(r).any() else 0.0
        f = floor or FLOOR[c.dtype]
        base = f * (top + 0.05 * scale)
        ec, ee = worst(c, r), worst(e, r)
        lim = 20 * base if strict_eager else (3 * ee if math.isfinite(ee) else 0.0) + base
        assert ec <= lim, f"{at}: error {ec:.3g} > {lim:.3g} (eager's own {ee:.3g}, top of ref {top:.3g})"


def by_formula():
    """SDPA without its kernels: on a GPU some fail at what the cases try (a frozen query, pointers off by one)."""
    return sdpa_kernel(SDPBackend.MATH)


def run_form_a(p, wrap, strict_eager):
    if p.get("config"):
        import torch._inductor.config as cfg

        with cfg.patch(p["config"]):
            return run_form_a(dict(p, config=None), wrap, strict_eager)
    fn, ref = p["fn"], p.get("ref") or p["fn"]
    diff, gout = p.get("diff"), p.get("gout", "randn")
    ctx = p.get("ctx") or contextlib.nullcontext
    pick = p.get("pick") or (lambda outs: outs)
    cand = wrap(fn, **p.get("compile", {}))
    for k, args in enumerate(p["calls"]):
        a, d = clone_args(args, diff)
        oc, gc = fwd_bwd(cand, a, d, gout, ctx)
        ae, d = clone_args(args, diff)
        with contextlib.nullcontext() if p.get("strides") or p.get("own_kernels") else by_formula():
            oe, ge = fwd_bwd(fn, ae, d, gout, ctx)
        own = p.get("ref_own_dtype")
        ar, d = clone_args(args, diff, None if own else torch.float64)
        rctx = ctx if own else contextlib.nullcontext
        with by_formula():
            orr, gr = fwd_bwd(ref, ar, d, gout, rctx)
        compare(
            f"call {k} out",
            pick(oc),
            pick(oe),
            [r.detach().double() for r in pick(orr)],
            strict_eager,
            p.get("floor"),
            p.get("strides"),
        )
        gr = [None if g is None else g.double() for g in gr]
        compare(f"call {k} grad", gc, ge, gr, strict_eager, p.get("floor"))
        if p.get("post"):
            p["post"](oc, gc, a)


def run_case(case, wrap, dev="cpu", dt="fp32", strict_eager=False):
    torch.manual_seed(0)
    built = case.build(dev, dt)
    for p in built if isinstance(built, list) else [built]:
        if "check" in p:
            p["check"](wrap)
        else:
            run_form_a(p, wrap, strict_eager)
