"""What computes a problem: every kernel of ours by name, and what PyTorch has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_inductor  # noqa: F401 - registers the op
from flash_inductor.ops import aten, cpu
from flash_inductor.testing import eager_attention

from .cases import Case

Results = dict[str, Tensor | None]  # by exact.RESULTS; lse is None where there is none
Implementation = Callable[[Case, Sequence[Tensor]], Results]


class Unsupported(Exception):
    """The implementation has no such feature."""


def _ours(kernel: str | None, case: Case, tensors: Sequence[Tensor]) -> Results:
    query, key, value, grad_out = tensors
    named = {**case.options, "kernel_name": kernel}
    out, lse = torch.ops.flashbwd.attn(query, key, value, **named)
    grads = torch.ops.flashbwd.attn_backward(grad_out, None, query, key, value, out, lse, **named)
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=False))}


def _tiled(case: Case, tensors: Sequence[Tensor]) -> Results:
    """Our CPU kernel also where ATen's would be taken."""
    with patch.object(cpu, "_aten_takes", lambda *args: False):
        return _ours(None, case, tensors)


def _through_aten(case: Case, tensors: Sequence[Tensor]) -> Results:
    """Where ATen's CPU kernel is taken."""
    calls = 0
    takes = cpu._aten_takes

    def counted(*args: Any) -> bool:
        nonlocal calls
        taken = takes(*args)
        calls += taken
        return taken

    with patch.object(cpu, "_aten_takes", counted):
        results = _ours(None, case, tensors)
    if not calls:
        raise Unsupported("ATen's kernel doesn't take this")
    return results


def _differentiated(attention: Callable[..., Tensor], tensors: Sequence[Tensor], lse: Tensor | None) -> Results:
    inputs = [x.detach().requires_grad_() for x in tensors[:3]]
    out = attention(*inputs)
    grads = torch.autograd.grad(out, inputs, tensors[3])
    return {"out": out.detach(), "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def _sdpa(backend: SDPBackend | None, case: Case, tensors: Sequence[Tensor]) -> Results:
    mask = None
    if case.options not in ({}, {"is_causal": True}):
        if backend is not SDPBackend.MATH or "softcap" in case.options:
            raise Unsupported("SDPA has no such feature")
        mask = case.spec.mask
        distance = torch.arange(case.kv_len, device=tensors[0].device) - torch.arange(
            case.q_len, device=tensors[0].device
        ).unsqueeze(1)
        keep = torch.ones_like(distance, dtype=torch.bool)
        if mask.lower is not None:
            keep &= distance >= mask.lower
        if mask.upper is not None:
            keep &= distance <= mask.upper
        mask = keep
    causal = "is_causal" in case.options and mask is None
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return _differentiated(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal),
            tensors,
            _lse(backend, causal, tensors),
        )


def _lse(backend: SDPBackend | None, causal: bool, tensors: Sequence[Tensor]) -> Tensor | None:
    """What a fused backend saves, where it takes the inputs as they are."""
    query, key, value = tensors[:3]
    try:
        if query.device.type == "cpu" and backend is SDPBackend.FLASH_ATTENTION:
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)[1]
        names = {SDPBackend.CUDNN_ATTENTION: "cudnn", SDPBackend.FLASH_ATTENTION: "flash"}
        if query.is_cuda and backend in names:
            scale = query.shape[-1] ** -0.5
            return aten.FORWARD[names[backend]](query, key, value, is_causal=causal, scale=scale)[1]
    except RuntimeError:
        pass
    return None


def _eager(case: Case, tensors: Sequence[Tensor]) -> Results:
    return _differentiated(partial(eager_attention, spec=case.spec), tensors, None)


def implementations(device: str) -> dict[str, Implementation]:
    """By name; those of ours begin with "ours"."""
    if device == "cpu":
        return {
            "ours tiled": _tiled,
            "ours ATen flash": _through_aten,
            "SDPA flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
            "SDPA math": partial(_sdpa, SDPBackend.MATH),
            "written out": _eager,
        }
    return {
        **{f"ours {name}": partial(_ours, name) for name in ("triton", "gluon", "cudnn", "flash")},
        "SDPA cuDNN": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
        "SDPA flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
        "SDPA efficient": partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION),
        "SDPA math": partial(_sdpa, SDPBackend.MATH),
        "written out": _eager,
    }
