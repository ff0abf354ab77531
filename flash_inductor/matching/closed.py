"""Exact evaluation of masks that depend on nothing but constants and buffers, and recognising a band by its values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..config import get_config
from . import canonical, effects
from .mask_domain import Pred, Top, TwoValued, Value, axis


@dataclass(frozen=True)
class Evaluated:
    """The real value of a mask, on the CPU, and the buffers that it was read from."""

    tensor: torch.Tensor
    buffers: tuple[fx.Node, ...]


# words in the names of operations that don't always give the same result
_CHANCE = [
    "rand",
    "bernoulli",
    "dropout",
    "normal",
    "multinomial",
    "uniform",
    "exponential",
    "poisson",
    "cauchy",
    "geometric",
    "rrelu",
    "empty",
]


def evaluate(mask: fx.Node, at: fx.Node, buffer_value: Callable[[fx.Node], torch.Tensor | None]) -> Evaluated | str:
    """Run the mask's part of the graph for real, or say why it can't be: an input, chance, a symbolic or large size."""
    nodes = effects.closure(mask, at)
    limit = get_config().max_mask_elements
    used: list[fx.Node] = []
    env: dict[fx.Node, Any] = {}
    for node in nodes:
        reason = _obstacle(node, limit)
        if reason is not None:
            return reason
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            real = buffer_value(node)
            if real is None:
                return f"the mask depends on `{node.target}`"
            used.append(node)
            # a copy: an in-place operation of the graph must not touch the user's buffer
            env[node] = real.detach().to("cpu", copy=True)
        else:
            try:
                env[node] = _run(node, env)
            except Exception as error:  # whatever torch raises here, the mask is simply not evaluated
                return f"evaluating the mask failed: {error}"
    result = env[mask]
    fake = canonical.tensor(mask)
    if not isinstance(result, torch.Tensor) or fake is None or (result.shape, result.dtype) != (fake.shape, fake.dtype):
        return "the mask evaluates to something else than its metadata says"
    return Evaluated(result, tuple(used))


def is_repeatable(node: fx.Node) -> bool:
    """Whether a node calls an operation of torch that always gives the same result for the same inputs."""
    name = str(getattr(node.target, "__name__", node.target))
    known = node.op == "call_method" or effects.is_torch_function(node)
    return known and not any(word in name for word in _CHANCE)


def _obstacle(node: fx.Node, limit: int) -> str | None:
    name = str(getattr(node.target, "__name__", node.target))
    if node.op not in ("placeholder", "get_attr") and not is_repeatable(node):
        return f"the mask depends on `{name}`"
    tensor = canonical.tensor(node)
    if tensor is not None:
        if not all(isinstance(s, int) for s in tensor.shape):
            return "the mask has symbolic sizes"
        if tensor.numel() > limit:
            return f"the mask has {tensor.numel()} elements, more than max_mask_elements={limit}"
    elif isinstance(canonical.value(node), (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return "the mask has symbolic sizes"
    return None


def _run(node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    metadata = effects.metadata_input(node)

    def read(n: fx.Node) -> Any:
        if n in env:
            return env[n]
        scalar = canonical.value(n)
        if isinstance(scalar, (bool, int, float, str, torch.device, torch.dtype, torch.Size)):
            return scalar
        tensor = canonical.tensor(n)
        if n is metadata and tensor is not None:  # only its shape and dtype matter
            return torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
        raise ValueError(f"`{n.name}` has no value")

    if canonical.tensor(node) is None and isinstance(canonical.value(node), (bool, int, float)):
        return canonical.value(node)
    args, kwargs = fx.map_arg((node.args, node.kwargs), read)
    args, kwargs = fx.node.map_aggregate((args, kwargs), _to_cpu)
    if node.op == "call_method":
        if node.target == "cuda":
            return args[0]
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if callable(node.target):
        return node.target(*args, **kwargs)
    raise ValueError(f"`{node.name}` can't be run")


def _to_cpu(arg: Any) -> Any:
    if isinstance(arg, torch.device) or (isinstance(arg, str) and arg.split(":")[0] in ("cuda", "xpu", "mps", "meta")):
        return torch.device("cpu")
    return arg


def recognise(tensor: torch.Tensor) -> Value:
    """A real tensor as an abstract value of its last two dims, exact at every element; Top if it is no band."""
    if tensor.is_complex() or tensor.is_sparse or tensor.layout is not torch.strided or tensor.numel() == 0:
        return Top("the mask's values aren't plain numbers")
    if tensor.numel() > get_config().max_mask_elements:
        return Top("the mask has more elements than max_mask_elements")
    rank = tensor.dim()
    t = _distinct(tensor.detach())
    t = t.reshape(-1, *t.shape[-2:]) if t.dim() >= 2 else t.reshape(1, 1, -1)
    low, high = (x.item() for x in torch.aminmax(t.to(torch.uint8) if t.dtype is torch.bool else t))
    if low != low or high != high:
        return Top("the mask's values include NaN")
    if low == high:
        return TwoValued(Pred(), (low, low), (low, low))
    plane = t[0]
    if t.shape[0] > 1 and not all(torch.equal(plane, other) for other in t[1:]):
        return Top("the mask's values differ between batch entries or heads")
    top = plane == (high if plane.dtype is not torch.bool else True)
    bottom = ~top
    if plane.dtype is not torch.bool:
        rest = plane[bottom]
        second = rest.max().item()
    else:
        second = 0
    for region, yes, no in ((top, (high, high), (low, second)), (bottom, (low, second), (high, high))):
        band = _band(region)
        if band is not None:
            return TwoValued(_predicate(band, rank), yes, no)
    return Top("the mask's values aren't a band of diagonals; only causal and sliding-window masks are")


def _distinct(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, without the copies that expand() made (stride 0) except in the last two dims."""
    for d in range(tensor.dim() - 2):
        if tensor.stride(d) == 0 and tensor.shape[d] > 1:
            tensor = tensor.narrow(d, 0, 1)
    return tensor.cpu()


def _band(visible: torch.Tensor) -> tuple[int | None, int | None] | None:
    """(lower, upper) if the bool matrix is exactly ``lower <= j - i <= upper``; a bound outside the matrix is None."""
    rows, columns = visible.shape
    index = visible.nonzero()
    if index.numel() == 0:
        return None
    distance = index[:, 1] - index[:, 0]
    lower, upper = int(distance.min()), int(distance.max())
    expected = torch.ones(rows, columns, dtype=torch.bool).triu_(lower).tril_(upper)
    if not torch.equal(expected, visible):
        return None
    return (None if lower <= -(rows - 1) else lower), (None if upper >= columns - 1 else upper)


def _predicate(band: tuple[int | None, int | None], rank: int) -> Pred:
    lower, upper = band
    row = axis(rank - 2, rank) if rank >= 2 else axis(rank - 1, rank, step=0)
    distance = axis(rank - 1, rank).plus(row, -1)
    atoms = []
    if lower is not None:
        atoms.append(distance.scaled(1, -lower))
    if upper is not None:
        atoms.append(distance.scaled(-1, upper))
    return Pred.of(atoms)
