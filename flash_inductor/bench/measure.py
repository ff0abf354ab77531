"""One cell of the grid: every implementation checked, then those that are right timed against each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from . import check, impls
from .bounds import is_wrong
from .case import Case
from .errors import in_one_line
from .timing import Clock, interleave

PARTS = ("forward", "backward")
REPEATS = 3  # further runs of a deterministic case, which must give the same bits
_FATAL = ("illegal memory access", "illegal instruction", "misaligned address", "launch failure", "device-side assert")
Told = Callable[[str, str], None]  # (case, implementation): what is running now


def nobody(case: str, impl: str) -> None:
    """Tell nobody."""


class Prepared:
    """An implementation compiled for a case, with an output whose backward can run any number of times."""

    def __init__(self, case: Case, name: str, tensors: Sequence[Tensor], device: str) -> None:
        attention = impls.IMPLEMENTATIONS[name](case, device)
        query, key, value, grad_out = tensors
        inputs = [x.detach().requires_grad_() for x in (query, key, value)]
        self.forward: Callable[[], Tensor] = lambda: attention(*inputs)
        self.out: Tensor
        self.backward = lambda: torch.autograd.grad(self.out, inputs, grad_out, retain_graph=True)
        self.out = self.forward()  # first calls compile, and may go another way than those that are timed
        self.backward()
        poison(tensors)
        self.out = self.forward()

    def results(self) -> list[Tensor]:
        return [self.out.detach(), *self.backward()]


def poison(tensors: Sequence[Tensor]) -> None:
    """Leave NaN in the memory that results of these shapes get next, so that what isn't written is seen."""
    for _ in range(2):
        held = [torch.full_like(x, torch.nan) for x in tensors for _ in range(2)]
        del held


def repeats(prepared: Prepared, results: Sequence[Tensor]) -> bool:
    """Whether forward and backward give the same bits again."""
    for _ in range(REPEATS):
        again = [prepared.forward().detach(), *prepared.backward()]
        if not all(torch.equal(x, y) for x, y in zip(results, again, strict=True)):
            return False
    return True


def is_fatal(error: Exception) -> bool:
    """Whether an error of the GPU has made this process useless: every later call would fail with it too."""
    return any(words in str(error) for words in _FATAL)


def is_refusal(error: Exception) -> bool:
    """Whether an implementation says that it doesn't take the case."""
    text = str(error)
    return isinstance(error, NotImplementedError) or "No viable backend" in text or "No available kernel" in text


def examine(
    case: Case, names: Sequence[str], tensors: Sequence[Tensor], device: str, told: Told
) -> tuple[dict[str, Any], dict[str, Prepared], check.Reference]:
    """Run and check each implementation once: what is known of each by name, and those that are worth timing."""
    told(str(case), "reference")
    expected = check.reference(case, tensors)
    found: dict[str, Any] = {}
    ready: dict[str, Prepared] = {}
    for name in names:
        told(str(case), name)
        begin = time.perf_counter()
        try:
            prepared = Prepared(case, name, tensors, device)
            poison(tensors)
            results = prepared.results()
            errors = check.errors(case, expected, results)
            found[name] = {"errors": errors, "first_call_s": time.perf_counter() - begin}
            if case.deterministic:
                found[name]["repeats"] = repeats(prepared, results)
            if is_wrong(case.dtype, errors):
                found[name]["error"] = "wrong results"
            else:
                ready[name] = prepared
        except impls.Unsupported as reason:
            found[name] = {"unsupported": str(reason)}
        except Exception as error:
            if is_fatal(error):
                raise
            kind = "unsupported" if is_refusal(error) else "error"
            found[name] = {kind: in_one_line(error)[:200]}
        release(device)
    return found, ready, expected


def measure(
    case: Case,
    names: Sequence[str],
    device: str,
    clock: Clock,
    *,
    rounds: int = 5,
    total_ms: float = 40.0,
    told: Told = nobody,
    broken: Collection[tuple[str, str]] = (),
) -> dict[str, Any]:
    """A cell as it stands in the JSON file.  ``broken`` (case, implementation) hung or died before and are left out."""
    begin = time.perf_counter()
    with impls.settings(case):
        tensors = impls.inputs(case, device)
        able = [name for name in names if (str(case), name) not in broken]
        found, ready, expected = examine(case, able, tensors, device, told)
        for part in PARTS:
            calls = {name: getattr(prepared, part) for name, prepared in ready.items()}
            times = interleave(calls, clock, rounds, total_ms, lambda name: told(str(case), name))
            for name, ms in times.items():
                median = statistics.median(ms)
                found[name][part] = {"ms": median, "tflops": case.flops[part] / median / 1e9, "rounds": ms}
    heads = f"{len(expected.heads)}/{case.batch * case.kv_heads}"
    against = f"{str(expected.dtype).removeprefix('torch.')}, {heads} key heads"
    del tensors, ready, expected
    torch.compiler.reset()
    release(device)
    return {
        "name": str(case),
        "group": case.group,
        "case": asdict(case),
        "flops": case.flops,
        "checked_against": against,
        "seconds": time.perf_counter() - begin,
        "impls": found,
    }


def compile_only(case: Case, name: str, device: str) -> None:
    """Run an implementation once, for what that leaves in the caches on disk."""
    with impls.settings(case):
        Prepared(case, name, impls.inputs(case, device), device).results()
    torch.compiler.reset()
    release(device)


def release(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()
