"""Help for tests: inputs in every layout, and comparison with the float64 reference under tolerances from the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .reference import Extras, attention_backward, attention_forward
from .spec import AttentionSpec
from .support import kernel_name

_HIDING = -1e4  # a bias below this stands for a hidden pair
LAYOUTS = ("bhnd", "bnhd", "nbhd", "packed", "expanded", "sliced", "strided")


def make_inputs(
    layout: str = "bhnd",
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    q_len: int = 24,
    kv_len: int | None = None,
    head_dim: int = 16,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and value [batch, heads, length, head dim] whose memory is laid out as ``layout`` says.

    "bhnd" contiguous; "bnhd", "nbhd" views of tensors with the dims in that order; "packed" views of one [batch,
    length, all heads, head dim] tensor (needs equal lengths and head dims); "expanded" key and value with one batch
    entry expanded; "sliced" rows and columns cut from a larger tensor; "strided" a last dim that isn't contiguous.
    """
    kv_heads, kv_len = kv_heads or heads, q_len if kv_len is None else kv_len
    generator = torch.Generator().manual_seed(seed)

    def rand(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device=device, dtype=dtype)

    def one(n_heads: int, length: int, dim: int, is_query: bool) -> Tensor:
        if layout == "bhnd":
            return rand(batch, n_heads, length, dim)
        if layout == "bnhd":
            return rand(batch, length, n_heads, dim).transpose(1, 2)
        if layout == "nbhd":
            return rand(length, batch, n_heads, dim).permute(1, 2, 0, 3)
        if layout == "expanded":
            x = rand(batch if is_query else 1, n_heads, length, dim)
            return x.expand(batch, n_heads, length, dim)
        if layout == "sliced":
            return rand(batch, n_heads, length + 3, dim + 8)[:, :, 1 : length + 1, :dim]
        if layout == "strided":
            return rand(batch, n_heads, dim, length).mT
        raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")

    if layout == "packed":
        if kv_len != q_len or v_head_dim not in (None, head_dim):
            raise ValueError("layout: 'packed' needs equal lengths and head dims")
        packed = rand(batch, q_len, heads + 2 * kv_heads, head_dim).transpose(1, 2)
        query, key, value = packed.split([heads, kv_heads, kv_heads], dim=1)
    else:
        query = one(heads, q_len, head_dim, True)
        key = one(kv_heads, kv_len, head_dim, False)
        value = one(kv_heads, kv_len, v_head_dim or head_dim, False)
    inputs = (query.detach(), key.detach(), value.detach())
    return inputs if not requires_grad else tuple(x.requires_grad_() for x in inputs)  # type: ignore[return-value]


def eager_attention(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec | None = None, **extras: Any
) -> Tensor:
    """Attention as people write it, softmax in float32 at least; zero rows for blind queries.

    ``extras`` are bias, mask, query_segments, key_segments, sinks, rng_state and dropout_p, as for the reference.
    """
    spec, more = spec or AttentionSpec(), Extras(**extras)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scale = query.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    scores = (query @ key.mT) * scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if more.bias is not None:
        scores = scores + more.bias.to(scores.dtype)
    seen = more.visible(spec.mask, query.shape[2], key.shape[2], query.device)
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if more.sinks is not None:
        scores = torch.cat([scores, more.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    wide = torch.promote_types(query.dtype, torch.float32)
    probs = torch.softmax(scores, -1, dtype=wide)[..., : key.shape[2]] * seen.any(-1, keepdim=True)
    probs = probs * torch.as_tensor(more.keep_factor(probs.shape), device=probs.device).to(wide)
    return probs.to(query.dtype) @ value


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference, in float64."""
    return (actual.double() - expected.double()).abs().max().item() if expected.numel() else 0.0


def largest_block_error(actual: Tensor, expected: Tensor) -> float:
    """The relative error, by norms, of the worst 32 rows of a head.

    A block of a sum that was left out shows here, where the largest element of a tensor may hide it.  Rows that are
    nearly zero are measured by their head's typical ones.
    """
    error, size = (actual.double() - expected).square().sum(-1), expected.double().square().sum(-1)
    typical = 3.2 * size.mean(2)
    worst = [
        e.sum(2) / s.sum(2).clamp_min(typical).clamp_min(1e-30)
        for e, s in zip(error.split(32, 2), size.split(32, 2), strict=True)
    ]
    return max(x.max().item() for x in worst) ** 0.5


def assert_close_to_reference(
    actual: Sequence[Tensor | None],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec | None = None,
    *,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    factor: float = 2.0,
    **extras: Any,
) -> None:
    """Raise AssertionError unless all results are as near to float64 as eager attention's are.

    ``actual`` are out, lse, grad_query, grad_key, grad_value, grad_bias, grad_sinks; it may end early or hold None for
    what is not compared.  Gradients need ``grad_out``.  ``extras`` are bias, mask, query_segments, key_segments, sinks,
    rng_state and dropout_p.  The tolerance is ``factor`` times the error of :func:`eager_attention` on the same inputs,
    plus a few roundings of the dtype at the largest value and at the size of the terms that cancel in a gradient: it
    comes from the data, so it needs no tuning for lengths, dtypes or scales.  Float64 is as wide as the reference, and
    compared under the proved bound of all roundings of both.
    """
    names = ("out", "lse", "grad_query", "grad_key", "grad_value", "grad_bias", "grad_sinks")
    words = [name for name, x in extras.items() if x is not None]
    if words == ["mask"] and extras["mask"].shape[2] == 1:
        words = ["padding"]
    spec = replace(spec or AttentionSpec(), extras=tuple(words))
    expected: list[Tensor | None] = list(attention_forward(query, key, value, spec, **extras))
    if grad_out is not None:
        expected += attention_backward(grad_out, grad_lse, query, key, value, spec, **extras)
    elif len(actual) > 2:
        raise ValueError("grad_out: expected a tensor to compare gradients, got None")
    eager = _eager(query, key, value, spec, grad_out if grad_lse is None else None, extras)
    terms = _terms(query, key, value, spec, grad_out, grad_lse, extras)
    wide = query.dtype is torch.float64
    most = _all_roundings(query, key, value, spec, grad_out, grad_lse, extras) if wide else {}
    eps = torch.finfo(query.dtype).eps
    inner_eps = min(eps, torch.finfo(torch.float32).eps)
    problems = []
    for name, got, want, baseline in zip(names, actual, expected, eager, strict=False):
        if got is None or want is None:
            continue
        if got.shape != want.shape:
            problems.append(f"{name}: expected shape {list(want.shape)}, got {list(got.shape)}")
            continue
        finite = torch.isfinite(want)
        # Infinite values and NaN have to be at the same places; an overflow of the narrow dtype is no such value.
        if not torch.equal(_signs(got[~finite]), _signs(want[~finite])):
            problems.append(f"{name}: non-finite values differ from the reference")
        got, want = got[finite], want[finite]
        if want.numel() == 0:
            continue
        typical, bound = terms[name]
        stored_eps = inner_eps if name == "lse" else max(eps, torch.finfo(got.dtype).eps)
        tolerance = 4 * stored_eps * (want.abs().max().item() + typical) + 4 * inner_eps * bound
        if name == "lse" and eps > inner_eps:
            tolerance += _approximation(query, key, value, spec)
        if baseline is not None:
            sound = torch.isfinite(baseline[finite])  # eager lets masked inf and NaN through
            tolerance += factor * error(baseline[finite][sound], want[sound])
        elif name.startswith("grad"):
            tolerance *= 4  # no eager gradient to compare with: as many roundings as products are chained
        if wide:
            tolerance = 2 * eps * most[name]
        if not (found := error(got, want)) <= tolerance:
            problems.append(f"{name}: error {found:.3e} exceeds {tolerance:.3e}")
    if problems:
        raise AssertionError("; ".join(problems))


def _approximation(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> float:
    """What the approximate functions that kernels use for 16-bit inputs add to the error of lse."""
    if query.is_cuda:
        return 2**-10 * (spec.softcap or 0.0)  # the hardware's tanh is good to 2^-11
    dtype = str(query.dtype).removeprefix("torch.")
    kernel = kernel_name(spec, query.shape, key.shape, value.shape, dtype, query.device.type)
    # ATen's exp is: with equal scores, where only exp(0) is summed, its lse is off by 5.3e-5 at every length, while the
    # same numbers given to it as float32 are right to 1e-6.
    return 2**-14 if kernel == "ATen CPU flash" else 0.0


def _signs(x: Tensor) -> Tensor:
    return torch.nan_to_num(x.double(), nan=3.0, posinf=1.0, neginf=2.0)


def _terms(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    extras: dict[str, Any],
) -> dict[str, tuple[float, float]]:
    """Typical size and bound of what is summed in each result: gradients are differences that may cancel entirely.

    The typical size goes with the roundings of the inputs' dtype, the bound with those of the products.
    """
    rows = query.shape[1] * query.shape[2] / max(1, key.shape[1] * key.shape[2])  # that share a key
    scale = abs(query.shape[-1] ** -0.5 if spec.scale is None else spec.scale)
    # Random roundings of the rows that one element of a gradient sums over.
    every_row = (query.shape[0] * query.shape[1] * query.shape[2]) ** 0.5
    bias = extras.get("bias")
    added = 0.0 if bias is None else _largest(bias[bias > _HIDING].unsqueeze(-1))
    sizes = []
    for size, width in ((_typical, query.shape[-1] ** 0.5), (_largest, 1.0)):
        q, k, v, go = (size(x) for x in (query, key, value, grad_out))
        term = go * v / (1 - extras.get("dropout_p", 0.0)) + size(None if grad_lse is None else grad_lse.unsqueeze(-1))
        score = scale * term
        sizes.append(
            {
                "lse": scale * q * k + added,
                "grad_query": score * k / width,
                "grad_key": score * q / width * rows,
                "grad_bias": term * every_row,
                "grad_sinks": term * every_row,
            }
        )
    terms = {name: (sizes[0][name], sizes[1][name]) for name in sizes[0]}
    # The absolute error of a score is the relative error of its probability, which weighs an element of value.
    element = _typical(value) / max(1, value.shape[-1]) ** 0.5
    return {"out": (0.0, sizes[0]["lse"] * element), **terms, "grad_value": (0.0, 0.0)}


def _all_roundings(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    extras: dict[str, Any],
) -> dict[str, float]:
    """How many units of relative rounding error a result may be off, in any order of its sums.

    A sum of n terms is off by at most n roundings of the sum of their magnitudes (Higham, Accuracy and Stability of
    Numerical Algorithms, section 4.2), and an absolute error of a score is a relative one of its probability.
    """
    q, k, v, go = (_largest(x) for x in (query, key, value, grad_out))
    bias, sinks = extras.get("bias"), extras.get("sinks")
    added = 0.0 if bias is None else _largest(bias[bias > _HIDING].unsqueeze(-1))
    added += 0.0 if sinks is None else _largest(sinks.unsqueeze(-1))
    scale = abs(query.shape[-1] ** -0.5 if spec.scale is None else spec.scale)
    # What all queries that share a key give it: the sum of a column of probabilities.
    ones, zeros = torch.ones_like(grad_out[..., :1]) if grad_out is not None else None, torch.zeros_like(value[..., :1])
    given = 0.0 if ones is None else _largest(attention_backward(ones, None, query, key, zeros, spec, **extras)[2])
    keep = 1 - extras.get("dropout_p", 0.0)
    through = 2 * (go * v / keep + _largest(None if grad_lse is None else grad_lse.unsqueeze(-1)))
    every_row = query.shape[0] * query.shape[1] * query.shape[2]
    # Of a probability, of an element of a row's result, and of the sum over the rows that share a key.
    weight = (1 + scale * q * k + added) * (8 + query.shape[3] + key.shape[2])
    row = weight + value.shape[3] + key.shape[2]
    column = row + query.shape[1] * query.shape[2] / max(1, key.shape[1])
    return {
        "out": v * row,
        "lse": weight,
        "grad_query": scale * through * k * row,
        "grad_key": scale * through * q * given * column,
        "grad_value": go / keep * given * column,
        "grad_bias": through
        * every_row
        * (row + every_row * key.shape[2] / max(1, 0 if bias is None else bias.numel())),
        "grad_sinks": through * every_row * (row + every_row),
    }


def _row_norms(x: Tensor | None) -> Tensor:
    norms = torch.zeros(1) if x is None or x.numel() == 0 else x.double().norm(dim=-1).flatten()
    return norms[norms.isfinite()] if norms.isfinite().any() else torch.zeros(1)


def _typical(x: Tensor | None) -> float:
    """Root mean square of the row norms."""
    return _row_norms(x).square().mean().sqrt().item()


def _largest(x: Tensor | None) -> float:
    return _row_norms(x).max().item()


def _eager(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, grad_out: Tensor | None, extras: dict[str, Any]
) -> list[Any]:
    """out, None for lse, then the gradients that the reference gives, or None for each."""
    names = ("query", "key", "value", "bias", "sinks")
    given = {"query": query, "key": key, "value": value, **extras}
    leaves = {name: x.detach().requires_grad_() for name in names if (x := given.get(name)) is not None}
    with torch.enable_grad():
        out = eager_attention(**{**given, **leaves}, spec=spec)
    grads: dict[str, Tensor] = {}
    if grad_out is not None:
        grads = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad_out), strict=True))
    return [out.detach(), None, *(grads.get(name) for name in names)]
