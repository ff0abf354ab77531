"""Nodes that run as another kernel than our templates: the op itself is called, with that kernel's name."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from .._compat import inductor
from .._compat.inductor import Expr, IRNode
from ..config import get_config
from ..kernels.choices import Band, Kind
from ..ops import choice, tuned
from ..ops.choice import Problem
from ..ops.extras import NO_EXTRAS, Extras
from ..spec import MaskSpec
from .measure import fastest

log = logging.getLogger(__name__)


def call_of_kernel(
    kind: Kind,
    call_op: Callable[..., Any],
    args: Sequence[IRNode | None],
    keywords: dict[str, Any],
    extras: Extras,
    constants: dict[str, Any],
) -> Any:
    """The node as a call of the op with the kernel that is chosen for it; None if that is our templates.

    ``args`` and ``keywords`` are those of the node, ``constants`` those of the templates.  Nothing is moved to memory
    unless another kernel than Triton's is likely.
    """
    first = 0 if kind == "fwd" else 2
    query, _, value = args[first : first + 3]
    asked, forced = keywords.get("kernel_name"), get_config().kernel
    if asked == "triton" or inductor.is_ahead_of_time():
        return None
    if extras is not NO_EXTRAS:
        return call_op(*args, **keywords) if asked else None  # the op says that the kernel knows none of these
    assert query is not None and value is not None
    problem = _problem(kind, query, value, keywords, constants, grad_lse=kind == "bwd" and args[1] is not None)
    measured = asked is None and forced == "auto" and inductor.max_autotune() and len(choice.eligible(problem)) > 1
    name = asked or choice.choose(problem, forced, tuned.current())
    if name == "triton" and not measured:
        return None
    args = inductor.in_traced_layout(args)
    read = args[:3] if kind == "fwd" else (args[0], *args[2:6])
    # The op would run unaligned tensors as eager Triton kernels: right, but slower than templates.
    if asked is None and not all(
        inductor.has_strides_of(x, 16 // problem.dtype.itemsize) for x in read if x is not None
    ):
        return None
    if measured:
        name = fastest(problem, args, keywords)
    if name == "triton":
        return None
    if name == "gluon":
        _compile_ahead(kind, args, keywords)
    keywords = {**keywords, "kernel_name": name}
    results = call_op(*args, **keywords)
    function = f"torch.ops.flashbwd.{'attn' if kind == 'fwd' else 'attn_backward'}"
    site = _site_name(args, keywords)
    inductor.call_directly(results, f"{function}.on_cuda" if site is None else f"{function}.at_site('{site}')")
    return results


def _site_name(args: Sequence[IRNode | None], keywords: dict[str, Any]) -> str | None:
    """The same for calls that are of one kind, whatever the graph.

    None if a size or option isn't known before the call: a site keeps what it was told first.
    """
    options = {name: inductor.static_int(x) if isinstance(x, sympy.Expr) else x for name, x in sorted(keywords.items())}
    if any(options[name] is None and x is not None for name, x in keywords.items()):
        return None
    words = [repr(options)]
    for x in args:
        numbers = [] if x is None else [inductor.static_int(n) for n in (*x.get_size(), *x.get_stride())]
        if None in numbers:
            return None
        words.append("None" if x is None else f"{numbers} {x.get_dtype()} {x.get_device()}")
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def _compile_ahead(kind: Kind, args: Sequence[IRNode | None], keywords: dict[str, Any]) -> None:
    """Let the kernels be compiled from now on, for the sizes that were traced."""
    from ..ops import cuda  # imports Triton

    device = next(x for x in args if x is not None).get_device().index or 0
    options = {name: inductor.hint(x) if isinstance(x, sympy.Expr) else x for name, x in keywords.items()}
    try:
        cuda.compile_ahead(kind, inductor.meta_like(args), device, options)
    except Exception as error:  # they are compiled when they are launched
        log.debug("nothing is compiled ahead: %s: %s", type(error).__name__, error)


def _problem(
    kind: Kind, query: IRNode, value: IRNode, keywords: dict[str, Any], constants: dict[str, Any], grad_lse: bool
) -> Problem:
    (_, _, q_len, head_dim), (_, _, kv_len, v_head_dim) = query.get_size(), value.get_size()
    band, square = band_of_constants(constants, q_len, kv_len)
    return Problem(
        kind,
        choice.device_limits(query.get_device().index or 0)[0],
        query.get_dtype(),
        int(head_dim),
        int(v_head_dim),
        (inductor.hint(q_len), inductor.hint(kv_len)),
        band,
        square,
        keywords.get("scale"),
        keywords.get("softcap") is not None,
        grad_lse=grad_lse,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        pairs=math.prod(map(inductor.hint, (*query.get_size()[:3], kv_len))),
    )


def band_of_constants(constants: dict[str, Any], q_len: Expr, kv_len: Expr) -> tuple[Band, bool]:
    """The band in the words of a choice: what holds for every value of a symbolic length."""
    same_length = inductor.known_equal(q_len, kv_len)
    lengths = [inductor.static_int(n) for n in (q_len, kv_len)]
    if constants["DIAGONAL_FROM_SIZES"] and not same_length:  # shifted by a symbol: no length tells what it hides
        lengths = [None, None]
        unknown = object()
        mask = MaskSpec(unknown if constants["HAS_LOWER"] else None, unknown if constants["HAS_UPPER"] else None)
    else:
        diagonal = constants["DIAGONAL_UP"] - constants["DIAGONAL_DOWN"]
        mask = MaskSpec(
            diagonal - constants["WINDOW_LEFT"] if constants["HAS_LOWER"] else None,
            diagonal + constants["WINDOW_RIGHT"] if constants["HAS_UPPER"] else None,
        )
    return choice.classify(mask, *lengths, same_length=same_length)
