"""A plan, carried out: the next exchange is on its way while attention computes with what the last one brought."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops import attn, attn_backward
from .exchange import Exchange, concatenate, rows_of
from .layout import Span
from .merge import Merge, Total
from .plan import Plan, Step


def forward(plan: Plan, group: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the queries of this rank over all keys that they see.  ``options``: scale, softcap."""
    merged = Merge(query, value)
    arriving = _start(plan, 0, group, key, value)
    for i, step in enumerate(plan.steps):
        current, arriving = arriving, _start(plan, i + 1, group, key, value)
        keys, values = _gather(plan, step, current, key, value)
        for tile in step.tiles:
            out, lse = attn(
                rows_of(query, tile.queries),
                rows_of(keys, tile.keys),
                rows_of(values, tile.keys),
                **options,
                **tile.band.to_window(),
            )
            merged.add(tile.queries, out, lse)
    return merged.result()


def backward(
    plan: Plan,
    group: Any,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_mask: tuple[bool, bool, bool],
    **options: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the queries, keys and values of this rank, None where not asked for.

    With the output and log-sum-exp over all keys, each call's probabilities are those of the whole softmax, so the
    gradients are the sums of those of the calls: of a query over the steps of its rank, of a key over the ranks that
    saw it, which send back what they have in the dtype of the keys.
    """
    wants_query, *wants_kv = grad_mask
    grad_query, grad_key, grad_value = Total(query), Total(key), Total(value)
    arriving = _start(plan, 0, group, key, value)
    returning: tuple[Step, Exchange] | None = None
    for i, step in enumerate(plan.steps):
        current, arriving = arriving, _start(plan, i + 1, group, key, value)
        keys, values = _gather(plan, step, current, key, value)
        of_keys, of_values = Total(keys), Total(values)
        for tile in step.tiles:
            rows = tile.queries
            grads = attn_backward(
                rows_of(grad_out, rows),
                None if grad_lse is None else rows_of(grad_lse, rows).contiguous(),
                rows_of(query, rows),
                rows_of(keys, tile.keys),
                rows_of(values, tile.keys),
                rows_of(out, rows),
                rows_of(lse, rows).contiguous(),
                **options,
                **tile.band.to_window(),
                grad_mask=[*grad_mask, False, False],
            )
            if wants_query:
                grad_query.add(rows, grads[0])
            for total, grad, wanted in zip((of_keys, of_values), grads[1:3], wants_kv, strict=True):
                if wanted:
                    total.add(tile.keys, grad)
        if not any(wants_kv):
            continue
        started = _return(plan, step, group, of_keys, of_values, grad_key, grad_value, wants_kv)
        _collect(returning, grad_key, grad_value, wants_kv)
        returning = started
    _collect(returning, grad_key, grad_value, wants_kv)
    totals = (grad_query, grad_key, grad_value)
    found = [total.result_like_op() if wanted else None for total, wanted in zip(totals, grad_mask, strict=True)]
    return found[0], found[1], found[2]


def _start(plan: Plan, index: int, group: Any, key: Tensor, value: Tensor) -> Exchange | None:
    """Start the exchange of a step, if there is such a step and it has one."""
    if index >= len(plan.steps) or not plan.steps[index].exchanges:
        return None
    step = plan.steps[index]
    return Exchange(group, (key, value), dict(step.send), dict(step.receive))


def _gather(plan: Plan, step: Step, arriving: Exchange | None, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a step."""
    found = arriving.wait() if arriving is not None else {}
    found[plan.rank] = [key, value]
    if not step.pieces:
        return key.narrow(2, 0, 0), value.narrow(2, 0, 0)
    first, last = step.pieces[0], step.pieces[-1]
    rows = Span(first.rows.start, last.rows.stop)
    if {piece.rank for piece in step.pieces} == {first.rank} and rows.size == sum(p.rows.size for p in step.pieces):
        keys, values = (rows_of(x, rows) for x in found[first.rank])  # they lie together: nothing to copy
        return keys, values
    keys, values = (concatenate([rows_of(found[piece.rank][i], piece.rows) for piece in step.pieces]) for i in range(2))
    return keys, values


def _return(
    plan: Plan,
    step: Step,
    group: Any,
    of_keys: Total,
    of_values: Total,
    grad_key: Total,
    grad_value: Total,
    wanted: list[bool],
) -> tuple[Step, Exchange] | None:
    """Add the gradients of own keys, and start to send back those of others."""
    grads = [total.result() for total, asked in zip((of_keys, of_values), wanted, strict=True) if asked]
    totals = [total for total, asked in zip((grad_key, grad_value), wanted, strict=True) if asked]
    back: dict[int, list[Any]] = {}
    at = 0
    for piece in step.pieces:
        rows = Span(at, at + piece.rows.size)
        at = rows.stop
        if piece.rank == plan.rank:
            for total, grad in zip(totals, grads, strict=True):
                total.add(piece.rows, rows_of(grad, rows))
        else:
            back.setdefault(piece.rank, []).append((piece.rows, rows))
    if not step.exchanges:
        return None
    # In the order in which the keys came, so that their owner knows which they are.
    send = {rank: [rows for _, rows in sorted(pairs)] for rank, pairs in back.items()}
    receive = {rank: sum(span.size for span in spans) for rank, spans in step.send}
    return step, Exchange(group, grads, send, receive)


def _collect(returning: tuple[Step, Exchange] | None, grad_key: Total, grad_value: Total, wanted: list[bool]) -> None:
    """Add the gradients that other ranks send back, in the order of the ranks: the sums are the same each time."""
    if returning is None:
        return
    step, exchange = returning
    came = exchange.wait()
    totals = [total for total, asked in zip((grad_key, grad_value), wanted, strict=True) if asked]
    for rank, spans in sorted(step.send):
        at = 0
        for span in spans:
            for total, grads in zip(totals, came[rank], strict=True):
                total.add(span, grads.narrow(2, at, span.size))
            at += span.size
