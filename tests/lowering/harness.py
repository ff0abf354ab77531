"""Lower a function for a fake CUDA device, run the generated code in the interpreter, compare with eager in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import fakecuda
import interp
import torch
from torch import Tensor

import flash_inductor.lowering
import flash_inductor.ops

assert flash_inductor.lowering.registered

# Errors relative to the largest value.  fp32: tens of roundings of fp32 sums.  16-bit: p and ds are rounded to the
# dtype before the second product (eps / 2 each, averaged down by the sum), the result once more.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def heads_inside(batch: int, length: int, heads: int, dim: int, **kwargs: Any) -> Tensor:
    """[batch, heads, length, dim] as a view of [batch, length, heads, dim], as projections give it."""
    return torch.randn(batch, length, heads, dim, **kwargs).transpose(1, 2)


def qkv(
    batch: int = 1,
    q_len: int = 40,
    kv_len: int | None = None,
    heads: int = 2,
    kv_heads: int | None = None,
    dim: int = 16,
    v_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Query, key and value that require grad."""
    kv_len = q_len if kv_len is None else kv_len
    kv_heads = heads if kv_heads is None else kv_heads
    shapes = [(q_len, heads, dim), (kv_len, kv_heads, dim), (kv_len, kv_heads, v_dim or dim)]
    return [heads_inside(batch, n, h, d, dtype=dtype).requires_grad_() for n, h, d in shapes]


@dataclass
class Case:
    """One function with inputs; ``runs`` are further inputs for the same generated code (dynamic lengths)."""

    function: Callable[..., Tensor]
    inputs: Sequence[Tensor]
    runs: Sequence[Sequence[Tensor]] = ()
    settings: dict[str, Any] = field(default_factory=dict)


def _like(values: Tensor, strides: Sequence[Any]) -> Tensor:
    """The values in a dense tensor with the order of these (maybe symbolic) strides."""
    numbers = [s if isinstance(s, int) else s.node.hint for s in strides]
    order = sorted(range(values.dim()), key=lambda i: -numbers[i])
    position = [order.index(i) for i in range(values.dim())]
    return values.permute(order).contiguous().permute(position)


Outcomes = dict[str, tuple[fakecuda.Lowered, list[float] | str]]


def execute(makers: dict[str, Callable[[], Case]]) -> Outcomes:
    """For each case the generated code, and its errors (relative to the largest value) or what it failed with.

    Errors are those of the output and of each gradient, for each of the runs, with fp32 products in fp32.
    """
    torch.manual_seed(0)
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return _execute({name: make() for name, make in makers.items()})
    finally:
        torch.set_float32_matmul_precision(previous)


def _execute(cases: dict[str, Case]) -> Outcomes:
    lowered, jobs, expected, owners = {}, [], [], []
    for name, case in cases.items():
        lowered[name] = fakecuda.lower(case.function, case.inputs, **case.settings)
        needs_grad = [x.requires_grad for x in case.inputs]
        for inputs in case.runs or [case.inputs]:
            reference_inputs = [
                x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs
            ]
            reference = case.function(*reference_inputs)
            tangent = torch.randn_like(reference).to(inputs[0].dtype)
            values = [reference.detach()]
            job = {"codes": lowered[name].codes, "inputs": _arguments(lowered[name], inputs), "n_outputs": 1}
            if any(needs_grad):
                wanted = [x for x in reference_inputs if x.requires_grad]
                values += torch.autograd.grad(reference, wanted, tangent.double())
                job["tangents"] = [_like(tangent, lowered[name].placeholder_strides(1)[-1])]
            jobs.append(job)
            expected.append(values)
            owners.append(name)
    outcomes: dict[str, Any] = {name: [] for name in cases}
    for name, got, values in zip(owners, interp.run_in_child(jobs), expected, strict=True):
        if isinstance(got, str) or isinstance(outcomes[name], str):
            outcomes[name] = got
            continue
        got = [x for x in got if isinstance(x, Tensor)]
        assert len(got) == len(values)
        outcomes[name] += [_error(a, b) for a, b in zip(got, values, strict=True)]
    return {name: (lowered[name], outcomes[name]) for name in cases}


def _error(got: Tensor, expected: Tensor) -> float:
    if got.shape != expected.shape or not got.isfinite().all():
        return float("inf")
    return ((got.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def _arguments(lowered: fakecuda.Lowered, inputs: Sequence[Tensor]) -> list[Any]:
    """What the generated code takes: sizes first where shapes are dynamic, then the tensors."""
    detached = [x.detach() for x in inputs]
    nodes = [n for n in lowered.graphs[0].graph.nodes if n.op == "placeholder"]
    tensor_nodes = [n for n in nodes if isinstance(n.meta["val"], torch.Tensor)]
    symbols = {}
    for node, x in zip(tensor_nodes, detached, strict=True):
        for size, number in zip(
            [*node.meta["val"].shape, *node.meta["val"].stride()], [*x.shape, *x.stride()], strict=True
        ):
            if not isinstance(size, int):
                symbols.setdefault(str(size), number)
    values = iter(detached)
    return [next(values) if n in tensor_nodes else symbols[str(n.meta["val"])] for n in nodes]
