"""Errors of an implementation's output and gradients, against the formula in high precision, a chunk at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .case import Case

RESULTS = ("out", "query", "key", "value")  # the output, and the gradients
PER_QUERY_HEAD = RESULTS[:2]
DOUBLE_UP_TO = 16384  # lengths whose reference is float64; above, float32
CHUNK = 2**27  # scores held at once
# A head and batch entry is a problem of its own.  Above so many FLOP of reference the others aren't compared.
MOST_FLOPS = 3e13


@dataclass(frozen=True)
class Reference:
    """Of ``heads`` [(batch entry, key head), ...], n of them, each with a group of query heads.

    ``results``: out and the gradient of query [n, group, N, D], those of key and value [n, 1, N, D], all float32.
    """

    heads: list[tuple[int, int]]
    results: dict[str, Tensor]
    dtype: torch.dtype


def chosen_heads(case: Case) -> list[tuple[int, int]]:
    """Which (batch entry, key head) to compare: all that MOST_FLOPS pays for, spread evenly, the last one included."""
    total = case.batch * case.kv_heads
    each = sum(case.flops.values()) / total
    count = max(1, min(total, int(MOST_FLOPS / each)))
    picked = sorted({round(i * (total - 1) / max(1, count - 1)) for i in range(count)}) if count > 1 else [total - 1]
    return [divmod(i, case.kv_heads) for i in picked]


def visible_keys(case: Case, first: int, last: int) -> tuple[int, int]:
    """The keys from a to b (exclusive) that the queries from ``first`` to ``last`` (exclusive) see."""
    lower, upper = case.band
    a = 0 if lower is None else max(0, first + lower)
    b = case.length if upper is None else min(case.length, last + upper)
    return a, b


def one_head(case: Case, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor) -> list[Tensor]:
    """out and gradients of one query head: [N, D] each, in the dtype of the arguments."""
    lower, upper = case.band
    scale, cap, n = 1.0 / math.sqrt(case.head_dim), case.softcap, case.length
    out, grad_query = torch.empty_like(grad_out), torch.empty_like(query)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    rows = max(1, min(n, CHUNK // n))
    for first in range(0, n, rows):
        last = min(n, first + rows)
        a, b = visible_keys(case, first, last)
        q, k, v, do = query[first:last], key[a:b], value[a:b], grad_out[first:last]
        s = (q @ k.T).mul_(scale)
        slope = None
        if cap is not None:
            t = s.div_(cap).tanh_()
            slope = 1 - t * t
            s = t * cap
        if lower is not None or upper is not None:
            at = torch.arange(max(last, b), device=q.device, dtype=torch.int32)
            distance = at[None, a:b] - at[first:last, None]
            if lower is not None:
                s.masked_fill_(distance < lower, -math.inf)
            if upper is not None:
                s.masked_fill_(distance > upper, -math.inf)
        p = torch.softmax(s, -1)
        out[first:last] = o = p @ v
        grad_value[a:b] += p.T @ do
        ds = (do @ v.T).sub_((do * o).sum(-1, keepdim=True)).mul_(p)
        if slope is not None:
            ds.mul_(slope)
        grad_query[first:last] = (ds @ k).mul_(scale)
        grad_key[a:b] += (ds.T @ q).mul_(scale)
    return [out, grad_query, grad_key, grad_value]


def reference(case: Case, tensors: Sequence[Tensor]) -> Reference:
    """For ``tensors`` query, key, value and grad_out, as ``impls.inputs`` makes them."""
    dtype = torch.float64 if case.length <= DOUBLE_UP_TO else torch.float32
    tf32, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    query, key, value, grad_out = (x.detach() for x in tensors)
    group = case.heads // case.kv_heads
    parts: dict[str, list[Tensor]] = {name: [] for name in RESULTS}
    heads = chosen_heads(case)
    try:
        for batch, kv_head in heads:
            k, v = key[batch, kv_head].to(dtype), value[batch, kv_head].to(dtype)
            members = range(kv_head * group, (kv_head + 1) * group)
            found = [one_head(case, query[batch, h].to(dtype), k, v, grad_out[batch, h].to(dtype)) for h in members]
            for name, results in zip(RESULTS, zip(*found, strict=True), strict=True):
                stacked = torch.stack(results)
                parts[name].append((stacked if name in PER_QUERY_HEAD else stacked.sum(0, keepdim=True)).float())
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    return Reference(heads, {name: torch.stack(tensors) for name, tensors in parts.items()}, dtype)


def errors(case: Case, expected: Reference, found: Sequence[Tensor]) -> dict[str, float]:
    """‖x - reference‖ / ‖reference‖ of each result, over the heads that the reference has; inf where x isn't finite.

    ``found``: the output and the gradients of query, key and value, [B, H, N, D].
    """
    group = case.heads // case.kv_heads
    device = found[0].device
    batches, kv_heads = (torch.tensor(column, device=device)[:, None] for column in zip(*expected.heads, strict=True))
    members = kv_heads * group + torch.arange(group, device=device)
    result = {}
    for name, x in zip(RESULTS, found, strict=True):
        want = expected.results[name]
        have = x.detach()[batches, members if name in PER_QUERY_HEAD else kv_heads].float()
        error = (torch.linalg.vector_norm(have - want) / torch.linalg.vector_norm(want)).item()
        # Heads that aren't compared must at least have been written.
        result[name] = error if bool(torch.isfinite(x).all()) and math.isfinite(error) else math.inf
    return result
