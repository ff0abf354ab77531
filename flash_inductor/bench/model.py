"""A training or inference step of a user's model: eager, as stock torch.compile and as the plugin make it."""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .errors import in_one_line
from .timing import Clock, interleave

NAMES = ("eager", "stock", "ours")
# Relative distance from float64 that is taken for rounding where eager's own isn't known to be larger.
ROUNDING = 8.0
Told = Callable[[str], None]


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from tensors(getattr(value, f.name))


def loss_of(result: Any) -> Tensor:
    """The result's ``loss`` if it has one, the result if it is a number, else the mean square of all its numbers."""
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    found = [x for x in tensors(result) if x.is_floating_point()]
    if not found:
        raise ValueError("the model returns no floating-point tensor; nothing can be compared or differentiated")
    if len(found) == 1 and found[0].dim() == 0:
        return found[0]
    return sum((x.float().square().mean() for x in found), torch.zeros((), device=found[0].device))


@dataclasses.dataclass(eq=False)  # a key of the clock's
class Step:
    """One step of ``model`` as ``call`` runs it; with ``train`` also its backward."""

    call: Callable[..., Any]
    model: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    train: bool

    def __call__(self) -> Tensor:
        if isinstance(self.model, nn.Module):
            self.model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(self.train):
            loss = loss_of(self.call(*self.args, **self.kwargs))
        if self.train:
            loss.backward()
        return loss.detach()

    def results(self) -> list[Tensor]:
        """Outputs, then the gradients of all parameters, in float64 on the CPU."""
        with torch.set_grad_enabled(self.train):
            result = self.call(*self.args, **self.kwargs)
        found = [x.detach() for x in tensors(result) if x.is_floating_point()]
        if self.train:
            if isinstance(self.model, nn.Module):
                self.model.zero_grad(set_to_none=True)
            loss_of(result).backward()
            parameters = self.model.parameters() if isinstance(self.model, nn.Module) else ()
            found += [p.grad for p in parameters if p.grad is not None]
            if isinstance(self.model, nn.Module):
                self.model.zero_grad(set_to_none=True)
        return [x.double().cpu() for x in found]


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A copy of nested tuples, lists and mappings with ``function`` of every tensor in its place."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: mapped(function, x) for key, x in value.items()}
    return type(value)(mapped(function, x) for x in value) if type(value) in (tuple, list) else value


def in_float64(x: Tensor) -> Tensor:
    """Floating-point tensors in float64, others as they are."""
    return x.detach().double() if x.is_floating_point() else x


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative error, by norms, of a tensor; infinite where they aren't alike."""
    if len(found) != len(expected) or any(x.shape != y.shape for x, y in zip(found, expected, strict=True)):
        return float("inf")
    worst = 0.0
    for x, y in zip(found, expected, strict=True):
        error = ((x - y).norm() / y.norm().clamp_min(torch.finfo(torch.float32).tiny)).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def measure(
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    train: bool,
    compiled: Mapping[str, Callable[[Any], Any]],
    clock: Clock,
    rounds: int = 5,
    total_ms: float = 1000.0,
    told: Told = lambda name: None,
) -> dict[str, Any]:
    """{"implementations": {name: {"ms", "rounds", "first_s", "error", "peak_mib"}}, "not_checked"}.

    ``compiled`` makes of the model what runs, by name.  Errors are relative to float64; ``not_checked`` says
    why there are none: a model that draws random numbers, or that can't run in float64.
    """
    found: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    expected, why = _expected(model, args, kwargs, train, told)
    for name, make in compiled.items():
        told(name)
        step = Step(make(model), model, args, kwargs, train)
        begin = time.perf_counter()
        step()
        found[name] = {"first_s": time.perf_counter() - begin}
        if expected is not None:
            found[name]["error"] = distance(step.results(), expected)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
            step()
            found[name]["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        steps[name] = step
    times = interleave(steps, clock, rounds, total_ms, told)
    for name, ms in times.items():
        found[name] |= {"ms": statistics.median(ms), "rounds": ms}
    return {"implementations": found, "not_checked": why}


def _expected(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], train: bool, told: Told
) -> tuple[list[Tensor] | None, str | None]:
    """What the model gives in float64, or why that isn't known."""
    told("float64")
    step = Step(model, model, args, kwargs, train)
    if not _same(step.results(), step.results()):
        return None, "the model draws random numbers (dropout?); --eval compares it without"
    try:
        exact = copy.deepcopy(model).double() if isinstance(model, nn.Module) else model
        arguments = mapped(in_float64, args), mapped(in_float64, kwargs)
        return Step(exact, exact, *arguments, train).results(), None
    except Exception as error:  # dtypes written into the model, no memory for it: no reason not to measure
        return None, f"the model doesn't run in float64: {in_one_line(error)}"


def _same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return distance(a, b) < 1e-3


def wrong(found: Mapping[str, Mapping[str, Any]], name: str = "ours") -> bool:
    """Whether an implementation is farther from float64 than rounding explains: several times eager or stock."""
    error = found[name].get("error")
    others = [x["error"] for other, x in found.items() if other != name and "error" in x]
    return error is not None and not error <= ROUNDING * max([*others, 1e-6])
