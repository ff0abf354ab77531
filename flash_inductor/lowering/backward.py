"""Lowering of ``flashbwd::attn_backward``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._compat import inductor
from .._compat.inductor import IRNode
from ..kernels.grad_bias import CHUNK
from ..ops.extras import Extras, take_extras
from ..ops.library import DEFAULT_GRADS, DEFAULTS, attn_backward
from .choices import bias_grid, key_grid, launch, load_template, query_grid
from .features import optionals, realize, varying_dims
from .kernel import call_of_kernel
from .problem import template_constants

_call_op = inductor.fallback(attn_backward)
_grad_query = load_template("grad_query", query_grid)
_grad_key_value = load_template("grad_key_value", key_grid)
_grad_bias = load_template("grad_bias", bias_grid)


@inductor.lowering(attn_backward)
def lower_attn_backward(
    grad_out: IRNode,
    grad_lse: IRNode | None,
    query: IRNode,
    key: IRNode,
    value: IRNode,
    out: IRNode,
    lse: IRNode,
    *tensors: IRNode | None,
    grad_mask: list[bool] = DEFAULT_GRADS,
    **keywords: Any,
) -> Any:
    """The op with the name of a kernel, or templates, with delta and grad_sinks as ordinary reductions."""
    args = (grad_out, grad_lse, query, key, value, out, lse, *tensors)
    with_mask = {**keywords, "grad_mask": list(grad_mask)}

    def call_op() -> Any:
        return _call_op(*args, **with_mask)

    options = {**DEFAULTS, **keywords}
    extras = take_extras(tensors, options)
    constants = template_constants(query, key, value, (grad_out, out), options)
    if constants is None:
        return call_op()
    called = call_of_kernel("bwd", _call_op, args, with_mask, extras, constants)
    if called is not None:
        return called
    want_query, want_key, want_value, want_bias, want_sinks = grad_mask
    bias = extras.bias
    extras, dropout_p = realize(extras), options["dropout_p"]
    delta = _delta(grad_out, grad_lse, out)
    rows = [inductor.contiguous_input(x) for x in (lse, delta)]
    inputs = [*(inductor.strided_input(x) for x in (query, key, value)), *rows, inductor.strided_input(grad_out)]
    batch, heads, q_len, _ = query.get_size()
    kv_heads, kv_len = key.get_size()[1:3]
    results = [None if wanted else inductor.allocate(inductor.output_layout(i)) for i, wanted in enumerate(grad_mask)]
    if want_query:
        extra = optionals(extras, dropout_p, extras.key_range)
        layout = inductor.output_layout(0)
        results[0] = launch(_grad_query, "dq", inputs, layout, [batch * heads, q_len], constants, extra=extra)
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
            inputs,
            layouts[0],
            [batch * kv_heads, kv_len],
            constants,
            mutated=[grad_value],
            extra=optionals(extras, dropout_p, extras.query_range),
        )
        if grad_key is None:
            return call_op()
        results[1] = grad_key if want_key else results[1]
        results[2] = grad_value if want_value else results[2]
    if want_bias and bias is not None:
        results[3] = _lower_grad_bias(bias, extras, dropout_p, inputs, constants)
        if results[3] is None:
            return call_op()
    if want_sinks and extras.sinks is not None:
        results[4] = _lower_grad_sinks(extras.sinks, *rows)
    return tuple(results)


def _lower_grad_bias(
    bias: IRNode, extras: Extras, dropout_p: float, inputs: Sequence[IRNode], constants: dict[str, Any]
) -> IRNode | None:
    """One template; what it leaves to sum of a bias that queries or keys share is an ordinary reduction."""
    dims = varying_dims(bias, "bhmn")
    sums = {"SUM_ROWS": "m" not in dims, "SUM_COLS": "n" not in dims}
    batches, heads = bias.get_size()[:2]
    q_len, kv_len = inputs[0].get_size()[2], inputs[1].get_size()[2]
    summed = [dim for dim, is_summed in ((2, sums["SUM_ROWS"]), (3, sums["SUM_COLS"])) if is_summed]
    layout = inductor.output_layout(3)
    if summed:
        sizes = [inductor.ceil_div(n, CHUNK) if dim in summed else n for dim, n in ((2, q_len), (3, kv_len))]
        layout = inductor.contiguous_layout(bias, [batches, heads, *sizes], torch.float32)
    grad = launch(
        _grad_bias,
        "dbias",
        inputs,
        layout,
        [batches * heads, q_len, kv_len],
        {**constants, **sums, "GRAD_DIMS": repr(dims), "CHUNK": CHUNK},
        extra=optionals(extras, dropout_p, None),
    )
    if grad is None or not summed:
        return grad
    grad = inductor.lower_aten(torch.ops.aten.sum.dim_IntList, grad, summed, True)
    return _convert(grad, bias.get_dtype())


def _lower_grad_sinks(sinks: IRNode, lse: IRNode, delta: IRNode) -> IRNode:
    """As :func:`flash_inductor.ops.extras.grad_sinks`."""
    aten, lower = torch.ops.aten, inductor.lower_aten
    wide = lower(aten.unsqueeze.default, _convert(sinks, torch.float32), -1)
    share = lower(aten.exp.default, lower(aten.sub.Tensor, wide, lse))
    product = lower(aten.mul.Tensor, share, delta)
    blind = lower(aten.eq.Scalar, lse, float("-inf"))
    product = lower(aten.where.self, blind, lower(aten.mul.Tensor, delta, 0.0), product)
    total = lower(aten.neg.default, lower(aten.sum.dim_IntList, product, [0, 2]))
    return _convert(total, sinks.get_dtype())


def _convert(x: IRNode, dtype: torch.dtype) -> IRNode:
    return inductor.lower_aten(torch.ops.prims.convert_element_type.default, x, dtype)


def _delta(grad_out: IRNode, grad_lse: IRNode | None, out: IRNode) -> IRNode:
    """rowsum(grad_out * out) - grad_lse in fp32, left to Inductor, which fuses it with what computes grad_out."""
    aten = torch.ops.aten
    product = inductor.lower_aten(aten.mul.Tensor, *(_convert(x, torch.float32) for x in (grad_out, out)))
    delta = inductor.lower_aten(aten.sum.dim_IntList, product, [-1])
    return delta if grad_lse is None else inductor.lower_aten(aten.sub.Tensor, delta, grad_lse)
