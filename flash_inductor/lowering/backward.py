"""Lowering of ``flashbwd::attn_backward``."""

from __future__ import annotations

from typing import Any

import torch

from .._compat import inductor
from .._compat.inductor import IRNode
from ..ops.library import DEFAULT_GRADS, DEFAULTS, attn_backward
from .choices import key_grid, launch, load_template, query_grid
from .problem import template_constants

_call_op = inductor.fallback(attn_backward)
_grad_query = load_template("grad_query", query_grid)
_grad_key_value = load_template("grad_key_value", key_grid)


@inductor.lowering(attn_backward)
def lower_attn_backward(
    grad_out: IRNode,
    grad_lse: IRNode | None,
    query: IRNode,
    key: IRNode,
    value: IRNode,
    out: IRNode,
    lse: IRNode,
    *extras: IRNode | None,
    grad_mask: list[bool] = DEFAULT_GRADS,
    **options: Any,
) -> Any:
    """Delta as an ordinary reduction, then one template for grad_query and one for grad_key and grad_value."""

    def call_op() -> Any:
        tensors = (grad_out, grad_lse, query, key, value, out, lse)
        return _call_op(*tensors, *extras, **options, grad_mask=list(grad_mask))

    if any(x is not None for x in extras) or options.keys() - DEFAULTS.keys() or options.get("dropout_p"):
        return call_op()
    constants = template_constants(query, key, value, (grad_out, out), {**DEFAULTS, **options})
    if constants is None:
        return call_op()
    want_query, want_key, want_value = grad_mask[:3]
    rows = [inductor.contiguous_input(x) for x in (lse, _delta(grad_out, grad_lse, out))]
    inputs = [*(inductor.strided_input(x) for x in (query, key, value)), *rows, inductor.strided_input(grad_out)]
    batch, heads, q_len, _ = query.get_size()
    kv_heads, kv_len = key.get_size()[1:3]
    results = [None if wanted else inductor.allocate(inductor.output_layout(i)) for i, wanted in enumerate(grad_mask)]
    if want_query:
        results[0] = launch(_grad_query, "dq", inputs, inductor.output_layout(0), [batch * heads, q_len], constants)
        if results[0] is None:
            return call_op()
    if want_key or want_value:
        # The tile computes both together: one that isn't wanted goes to a scratch buffer.
        layouts = [
            inductor.output_layout(i) if wanted else inductor.contiguous_layout(x)
            for i, wanted, x in ((1, want_key, key), (2, want_value, value))
        ]
        grad_value = inductor.allocate_realized(layouts[1])
        grad_key = launch(
            _grad_key_value,
            "dkdv",
            [*inputs, grad_value],
            layouts[0],
            [batch * kv_heads, kv_len],
            constants,
            mutated=[grad_value],
        )
        if grad_key is None:
            return call_op()
        results[1] = grad_key if want_key else results[1]
        results[2] = grad_value if want_value else results[2]
    return tuple(results)


def _delta(grad_out: IRNode, grad_lse: IRNode | None, out: IRNode) -> IRNode:
    """rowsum(grad_out * out) - grad_lse in fp32, left to Inductor, which fuses it with what computes grad_out."""
    aten, to_dtype = torch.ops.aten, torch.ops.prims.convert_element_type.default
    product = inductor.lower_aten(
        aten.mul.Tensor, *(inductor.lower_aten(to_dtype, x, torch.float32) for x in (grad_out, out))
    )
    delta = inductor.lower_aten(aten.sum.dim_IntList, product, [-1])
    return delta if grad_lse is None else inductor.lower_aten(aten.sub.Tensor, delta, grad_lse)
