"""Is what the pass makes right: outputs and every parameter's gradient against eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .measure import Coverage, count_outside, grad_mode, pass_then, warm_up

# Relative distance in the 2-norm.  fp32 rounding gives 1e-7 to 1e-5; a wrong mask, scale or bias 1e-3 and more.
TOLERANCE = 1e-4
# A gradient that is zero but for cancellation (a key's bias) is compared with the largest gradient instead.
NEGLIGIBLE = 1e-6


@dataclass
class Comparison:
    """The largest relative distances, and where they are."""

    output: float = 0.0
    gradient: float = 0.0
    worst: str = ""  # the parameter with the largest distance
    right: bool = True


def _probabilities(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Every attribute of a module or its config that holds a dropout probability above zero."""
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            for name, value in list(vars(owner).items()) if owner is not None else ():
                called = "drop" in name or (name == "p" and "Drop" in type(module).__name__)
                if called and isinstance(value, float) and value > 0:
                    yield owner, name


def has_dropout(model: nn.Module) -> bool:
    return next(_probabilities(model), None) is not None


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout probability to zero, in place."""
    for owner, name in _probabilities(model):
        setattr(owner, name, 0.0)
    return model


def tensors_of(output: Any, name: str = "output") -> dict[str, torch.Tensor]:
    """The floating-point tensors of a model's output, by name; a KV cache isn't followed."""
    if isinstance(output, torch.Tensor):
        return {name: output} if output.is_floating_point() else {}
    if isinstance(output, dict):
        items = list(output.items())
    elif isinstance(output, list | tuple):
        items = list(enumerate(output))
    else:
        return {}
    return {k: v for key, item in items for k, v in tensors_of(item, f"{name}.{key}").items()}


def _visible(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The rows of an output that aren't padding; all, if it has no such rows."""
    return x[mask.bool()] if mask is not None and x.shape[: mask.dim()] == mask.shape else x


def run(
    call: Callable[..., Any], model: nn.Module, inputs: dict[str, Any], train: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs without padded rows, and gradients of a random projection of them."""
    with grad_mode(train):
        torch.manual_seed(1)
        outputs = {k: _visible(v, inputs.get("attention_mask")) for k, v in tensors_of(call(**inputs)).items()}
        gradients = {}
        if train:
            generator = torch.Generator().manual_seed(2)
            terms = [(v * torch.randn(v.shape, generator=generator)).sum() for v in outputs.values() if v.requires_grad]
            torch.stack(terms).sum().backward()
            gradients = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    return {k: v.detach() for k, v in outputs.items()}, gradients


def distance(ours: torch.Tensor, theirs: torch.Tensor, floor: float = 0.0) -> float:
    """Relative distance in the 2-norm, infinite where NaN meets a number."""
    difference = (ours.double() - theirs.double()).norm().item()
    scale = max(theirs.double().norm().item(), floor)
    if difference != difference:
        return 0.0 if torch.equal(ours.isnan(), theirs.isnan()) else float("inf")
    return difference / scale if scale else (0.0 if difference == 0 else float("inf"))


def compare(
    model: nn.Module, inputs: dict[str, Any], *, train: bool, backend: str | None = None, dynamic: bool | None = False
) -> tuple[Comparison, Coverage]:
    """Run a model in eager and with the pass, dropout off in both, and compare."""
    model = without_dropout(model)
    warm_up(model, inputs)
    ours = copy.deepcopy(model)
    outputs, gradients = run(model, model, inputs, train)
    torch._dynamo.reset()
    coverage = Coverage()
    compiled = torch.compile(ours, backend=pass_then(backend, coverage), dynamic=dynamic)
    our_outputs, our_gradients = run(compiled, ours, inputs, train)
    with grad_mode(train):
        count_outside(compiled, inputs, coverage)
    result = Comparison()
    same_names = outputs.keys() == our_outputs.keys() and gradients.keys() == our_gradients.keys()
    if not same_names or not outputs or bool(train) != bool(gradients):
        return Comparison(float("inf"), float("inf"), "other outputs or gradients", right=False), coverage
    result.output = max(distance(our_outputs[k], v) for k, v in outputs.items())
    largest = max((g.double().norm().item() for g in gradients.values()), default=0.0)
    for name, gradient in gradients.items():
        floor = largest * NEGLIGIBLE / TOLERANCE
        if (d := distance(our_gradients[name], gradient, floor)) >= result.gradient:
            result.gradient, result.worst = d, name
    result.right = max(result.output, result.gradient) <= TOLERANCE
    return result, coverage
