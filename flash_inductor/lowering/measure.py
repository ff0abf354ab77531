"""max_autotune: the fastest kernel for a node on this device, from tensors of the node's sizes and strides."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch import Tensor

from .._compat import inductor
from .._compat.inductor import IRNode
from ..ops import choice, tuned
from ..ops.choice import Problem
from ..ops.library import attn, attn_backward

log = logging.getLogger(__name__)
_fastest: dict[Any, str] = {}  # of this process: a layer is measured once, not once per node


def fastest(problem: Problem, args: Sequence[IRNode | None], keywords: dict[str, Any]) -> str:
    """Times every kernel that takes the problem; the table decides if none can be timed.

    ``args`` are the node's, in memory.  Our templates compete as the eager kernels, which compute the same tiles.
    """
    options = {k: inductor.hint(v) if isinstance(v, sympy.Expr) else v for k, v in keywords.items()}
    shapes = [None if x is None else (*map(inductor.hint, (*x.get_size(), *x.get_stride())),) for x in args]
    device = next(x for x in args if x is not None).get_device()
    key = (problem, str(device), *shapes, repr(options))
    if key not in _fastest:
        times = _times(problem, args, options, device)
        _fastest[key] = min(times, key=times.__getitem__) if times else choice.choose(problem, table=tuned.current())
        words = ", ".join(f"{name} {ms:.3f} ms" for name, ms in sorted(times.items(), key=lambda item: item[1]))
        log.info("%s, %s: %s", problem, device, words)
    return _fastest[key]


def _times(
    problem: Problem, args: Sequence[IRNode | None], options: dict[str, Any], device: torch.device
) -> dict[str, float]:
    times: dict[str, float] = {}
    op = attn if problem.kind == "fwd" else attn_backward
    try:
        tensors = inductor.real_like(args, device)
        if problem.kind == "bwd":
            _fill_saved(tensors, options)
    except Exception as error:  # out of memory, say: no reason for the compilation to fail
        log.warning("can't measure attention kernels: %s: %s", type(error).__name__, error)
        return times
    for name in choice.eligible(problem):
        call = partial(op, *tensors, **{**options, "kernel_name": name})
        try:
            times[name] = inductor.milliseconds(call)
        except Exception as error:
            log.warning("%s is left out for %s: %s: %s", name, problem, type(error).__name__, error)
    return times


def _fill_saved(tensors: Sequence[Tensor | None], options: dict[str, Any]) -> None:
    """out and lse of the backward's arguments from the others: with random ones it would compute infinities."""
    forward_options = {key: value for key, value in options.items() if key != "grad_mask"}
    with inductor.no_modes():
        results = attn(*tensors[2:5], **{**forward_options, "kernel_name": "triton"})
        for saved, result in zip(tensors[5:7], results, strict=True):
            if saved is not None:
                saved.copy_(result)
