"""Attention and its gradients in float64 a few rows at a time, and how far a kernel's roundings may carry it off.

The bounds are first-order and hold for every order of the sums.  With u the unit roundoff of the inputs' dtype, a that
of the accumulators, e the relative error of exp, t that of tanh, h what a number loses at most where it is too small
for the dtype, and g(n) = n a the bound of a sum of n terms (Higham, Accuracy and Stability of Numerical Algorithms,
2002, lemma 3.1 and section 3.1; a product of matrices, section 3.5):

    score          ds_ij <= g(D) scale |q_i| |k_j| + 4 a (|z_ij| + max_j |z_ij|) + t softcap
    lse            dl_i  <= sum_j p_ij (ds_ij + e) + g(N) + 2 a |lse_i|
    out            do_i  <= sum_j p_ij (ds_ij + e + dl_i + u + g(N)) |v_j| + h N max p max |v| + u |out_i|
    delta          dd_i  <= |dO_i| . do_i + g(Dv) |dO_i| . |out_i|
    grad_value_j         <= sum_i p_ij (ds_ij + e + dl_i + u + g(N)) |dO_i| + h N max |dO| + u |dv_j|
    grad_score_ij        <= p_ij slope_ij ((ds_ij + e + dl_i + u + 2 a) |dP_ij - delta_i| + g(Dv) |dO_i| |v_j| + dd_i)
                            + 2 (t + a) p_ij |dP_ij - delta_i|     with a softcap
    grad_query_i         <= scale (sum_j (grad_score_ij + g(N) |ds_ij|) |k_j| + h N max |k|) + u |dq_i|, grad_key alike

u for the probabilities and for dS, which go into a product of matrices in the inputs' dtype, as in FlashAttention (Dao
2023, algorithms 1 and 2), and again for each result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_inductor.reference.attention import visible
from flash_inductor.spec import AttentionSpec, MaskSpec

RESULTS = ("out", "lse", "dq", "dk", "dv")
SECOND_ORDER = 1.1  # products of two errors, in 16 bits a few per cent
MOST_SCORES = {"cpu": 1 << 22, "cuda": 1 << 26}  # held at once


@dataclass(frozen=True)
class Roundings:
    """Relative errors of single operations; see the module's text."""

    stored: float  # u
    summed: float  # a
    least: float  # h
    exp: float  # e
    tanh: float  # t


def roundings(dtype: torch.dtype, device: str) -> Roundings:
    """Of the kernels on a device."""
    info = torch.finfo(dtype)
    narrow = info.bits == 16
    stored, least = info.eps / 2, info.smallest_normal  # the latter: what is below may be flushed to 0
    if dtype is torch.float16:
        least *= stored  # nothing flushes fp16
    if dtype is torch.float64:
        return Roundings(stored, stored, least, 2 * stored, 2 * stored)
    if device == "cpu":
        # ATen's exp for 16-bit inputs is an approximation
        return Roundings(stored, 2.0**-24, least, 2.0**-14 if narrow else 2.0**-23, 2.0**-22)
    # Tensor cores cut their sums off instead of rounding.  PTX: ex2.approx 2^-22, tanh.approx 2^-11 (16 bits only).
    return Roundings(stored, 2.0**-23, least, 2.0**-21, 2.0**-10 if narrow else 2.0**-21)


def exact(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, spec: AttentionSpec, unit: Roundings
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results and bounds of their errors, both by the names RESULTS, float64, in the shapes of the op's.

    Inputs [B, H, N, D] are finite.  ``spec`` has no extras.
    """
    batch, heads, q_len, head_dim = query.shape
    kv_len, group = key.shape[2], heads // key.shape[1]
    v_dim = value.shape[3]
    k, v = (x.double().repeat_interleave(group, 1) for x in (key, value))
    shapes = {"out": (q_len, v_dim), "lse": (q_len,), "dq": (q_len, head_dim), "dk": k.shape[2:], "dv": v.shape[2:]}
    found, bound = ({n: k.new_zeros((batch, heads, *shape)) for n, shape in shapes.items()} for _ in range(2))
    step = max(1, min(q_len, MOST_SCORES[query.device.type] // (batch * heads * kv_len)))
    for i in range(0, q_len, step):
        rows = slice(i, min(q_len, i + step))
        band = MaskSpec(*(None if end is None else end + i for end in (spec.mask.lower, spec.mask.upper)))
        part = AttentionSpec(spec.scale, band, spec.softcap)
        tensors = (query[:, :, rows].double(), k, v, grad_out[:, :, rows].double())
        for total, some in zip((found, bound), _rows(*tensors, part, unit, q_len), strict=True):
            for name in ("out", "lse", "dq"):
                total[name][:, :, rows] = some[name]
            for name in ("dk", "dv"):
                total[name] += some[name]
    for name in ("dq", "dk", "dv"):
        bound[name] += unit.stored * found[name].abs()
    for total in (found, bound):
        for name in ("dk", "dv"):
            total[name] = total[name].unflatten(1, (-1, group)).sum(2)
    return found, {name: SECOND_ORDER * x for name, x in bound.items()}


def _rows(
    q: Tensor, k: Tensor, v: Tensor, go: Tensor, spec: AttentionSpec, unit: Roundings, q_len: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of some rows, against all keys: their own results, and their share of the keys' and values'."""
    scale = 1 / math.sqrt(q.shape[-1]) if spec.scale is None else spec.scale
    a, u, h = unit.summed, unit.stored, unit.least
    kv_len = k.shape[2]
    over_keys, over_rows = (a * (1.25 * n + 16) for n in (kv_len, q_len))  # 1.25: running sums are rescaled in between
    seen = visible(spec.mask, q.shape[2], kv_len, q.device)
    z = scale * (q @ k.mT)
    slope: Tensor | float = 1.0
    score = a * q.shape[-1] * abs(scale) * (q.abs() @ k.abs().mT)
    if spec.softcap is not None:
        tanh = torch.tanh(z / spec.softcap)
        z, slope = spec.softcap * tanh, 1 - tanh**2
        score += unit.tanh * spec.softcap
    size = z.abs().masked_fill(~seen, 0)
    score += 4 * a * (size + size.amax(-1, keepdim=True))
    z = z.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(z, -1, keepdim=True)
    p = torch.exp(z - lse.masked_fill(lse == -math.inf, 0)).masked_fill(~seen, 0)
    out = p @ v
    error = score + unit.exp
    lse_error = (p * error).sum(-1, keepdim=True) + over_keys + 2 * a * lse.masked_fill(lse == -math.inf, 0).abs()
    error = error + lse_error
    width = (1, 2, 3)
    out_error = (p * (error + u + over_keys)) @ v.abs() + u * out.abs()
    out_error += h * kv_len * p.amax(-1, keepdim=True) * v.abs().amax(width, keepdim=True)
    delta = (go * out).sum(-1, keepdim=True)
    delta_error = (go.abs() * (out_error + a * v.shape[-1] * out.abs())).sum(-1, keepdim=True)
    rest = go @ v.mT - delta
    ds = p * rest * slope
    ds_error = (error + u + 2 * a) * rest.abs() + a * v.shape[-1] * (go.abs() @ v.abs().mT) + delta_error
    ds_error = p * slope * ds_error
    if spec.softcap is not None:
        ds_error += 2 * (unit.tanh + a) * p * rest.abs()
    found = {"out": out, "lse": lse.squeeze(-1), "dq": scale * (ds @ k), "dk": scale * (ds.mT @ q), "dv": p.mT @ go}
    scale = abs(scale)
    bound = {
        "out": out_error,
        "lse": lse_error.squeeze(-1),
        "dq": scale * ((ds_error + over_keys * ds.abs()) @ k.abs() + h * kv_len * k.abs().amax(width, keepdim=True)),
        "dk": scale * ((ds_error + over_rows * ds.abs()).mT @ q.abs() + h * q.shape[2] * q.abs().amax(width, True)),
        "dv": (p * (error + u + over_rows)).mT @ go.abs() + h * q.shape[2] * go.abs().amax(width, keepdim=True),
    }
    return found, bound
