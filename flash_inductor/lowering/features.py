"""The optional tensors of a node as the templates take them: further inputs, and constants that say which there are."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from .._compat import inductor
from .._compat.inductor import IRNode
from ..kernels import features
from ..ops.cuda_features import dropout_constants
from ..ops.extras import Extras


@dataclass(frozen=True)
class Optionals:
    """What one template gets beside its own inputs; ``pair_bytes`` as in ``kernels.configs.configs``."""

    inputs: list[IRNode]
    constants: dict[str, Any]
    pair_bytes: int


def realize(extras: Extras) -> Extras:
    """The optional tensors in memory, expanded dims of size 1, so that no expansion is stored."""

    def one(name: str, x: IRNode) -> IRNode:
        last = len(x.get_size()) - 1
        for dim in inductor.expanded_dims(name):
            if dim < last or name in ("bias", "mask"):  # the kernels read rows of the others
                x = inductor.lower_aten(torch.ops.aten.slice.Tensor, x, dim, 0, 1)
        if name in ("bias", "mask") and inductor.static_int(x.get_size()[-1]) == 1:
            return inductor.any_input(x)
        return inductor.strided_input(x)

    given = {field.name: getattr(extras, field.name) for field in fields(extras)}
    return replace(extras, **{name: one(name, x) for name, x in given.items() if x is not None})


def varying_dims(x: IRNode | None, names: str) -> str:
    """Those names of dims in which ``x`` isn't of size 1."""
    if x is None:
        return ""
    return "".join(n for n, size in zip(names, x.get_size(), strict=False) if inductor.static_int(size) != 1)


def optionals(extras: Extras, dropout_p: float, span: IRNode | None, with_sinks: bool = False) -> Optionals:
    """For one template; ``span`` is the key_range or query_range that bounds its loop."""
    dims = {
        "BIAS_DIMS": varying_dims(extras.bias, "bhmn"),
        "MASK_DIMS": varying_dims(extras.mask, "bhmn"),
        "Q_SEGMENTS_DIMS": varying_dims(extras.query_segments, "b"),
        "K_SEGMENTS_DIMS": varying_dims(extras.key_segments, "b"),
        "RANGE_DIMS": varying_dims(span, "bt"),
    }
    dropout = extras.rng_state if dropout_p > 0 else None
    threshold, rescale = dropout_constants(dropout_p)
    sinks = extras.sinks if with_sinks else None

    def pairs(x: IRNode | None, name: str) -> tuple[bool, bool] | None:
        return None if x is None else ("m" in dims[name], "n" in dims[name])

    chosen = features.flags(
        bias=pairs(extras.bias, "BIAS_DIMS"),
        mask=pairs(extras.mask, "MASK_DIMS"),
        segments=extras.query_segments is not None,
        dropout=dropout is not None,
        sink=sinks is not None,
        range=span is not None,
    )
    # In the order of OPTIONAL in templates/common.jinja.
    inputs = [extras.bias, extras.mask, extras.query_segments, extras.key_segments, dropout, sinks, span]
    constants = {
        **{name: repr(value) for name, value in dims.items()},  # written into the kernel's text as they are
        "HAS_BIAS": extras.bias is not None,
        "HAS_MASK": extras.mask is not None,
        "HAS_SEGMENTS": extras.query_segments is not None,
        "HAS_DROPOUT": dropout is not None,
        "HAS_SINKS": sinks is not None,
        "HAS_RANGE": span is not None,
        "DROPOUT_THRESHOLD": threshold,
        "DROPOUT_SCALE": rescale,
        "FEATURES": chosen,
    }
    of_pairs: tuple[tuple[IRNode | None, str], ...] = ((extras.bias, "BIAS_DIMS"), (extras.mask, "MASK_DIMS"))
    pair_bytes = sum(x.get_dtype().itemsize for x, name in of_pairs if x is not None and "mn" in dims[name])
    return Optionals([x for x in inputs if x is not None], constants, pair_bytes + (dropout is not None))
