"""Lowering of ``flashbwd::attn``."""

from __future__ import annotations

from typing import Any

from .._compat import inductor
from .._compat.inductor import IRNode
from ..ops.extras import take_extras
from ..ops.library import DEFAULTS, attn
from .choices import launch, load_template, query_grid
from .features import optionals, realize
from .kernel import call_of_kernel
from .problem import template_constants

_call_op = inductor.fallback(attn)
_template = load_template("forward", query_grid)


@inductor.lowering(attn)
def lower_attn(query: IRNode, key: IRNode, value: IRNode, *tensors: IRNode | None, **keywords: Any) -> Any:
    """The op with the name of a kernel, or one template that stores out, and lse if something reads it."""
    options = {**DEFAULTS, **keywords}
    extras = take_extras(tensors, options)
    constants = template_constants(query, key, value, (), options)
    args = (query, key, value, *tensors)
    if constants is None:
        return _call_op(*args, **keywords)
    called = call_of_kernel("fwd", _call_op, args, keywords, extras, constants)
    if called is not None:
        return called
    extras = realize(extras)
    extra = optionals(extras, options["dropout_p"], extras.key_range, with_sinks=True)
    inputs = [inductor.strided_input(x) for x in (query, key, value)]
    # A template has one output; what else it writes is an input allocated beforehand and marked as mutated.
    store_lse = inductor.output_is_used(1)
    lse = inductor.allocate(inductor.output_layout(1)) if store_lse else None
    mutated = [inductor.contiguous_input(lse)] if store_lse else []
    batch, heads, q_len, _ = inputs[0].get_size()
    out = launch(
        _template,
        "fwd",
        inputs,
        inductor.output_layout(0),
        [batch * heads, q_len],
        {**constants, "STORE_LSE": store_lse},
        mutated,
        extra=extra,
    )
    if out is None:
        return _call_op(*args, **keywords)
    return out, mutated[0] if store_lse else None
