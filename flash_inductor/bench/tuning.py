"""Times what the tuning tables choose between: kernels for a problem, tiles for a Triton kernel.  Needs a GPU."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..kernels.choices import KERNELS
from ..kernels.configs import Config, Kind, configs, fitting, known
from ..ops import choice, triton_kernels
from . import impls, ranking
from .case import Case
from .errors import in_one_line
from .timing import Call, Clock, interleave

ROUNDS = 3
SAME = 2e-2  # relative difference of two right results
# Products of each Triton kernel, in units of the forward's two.
SHARE: dict[Kind, float] = {"fwd": 1.0, "dq": 1.5, "dkdv": 2.0}
Say = Callable[[str], None]  # is told what fails
Offer = Callable[[Kind, int, int, int, int | None], tuple[Config, ...]]


def cases(
    head_dims: Iterable[int],
    kinds: Sequence[tuple[bool, int | None, float | None]],
    lengths: Sequence[int],
    tokens: int = 16384,
    width: int = 2048,
) -> list[Case]:
    """Each head dim with each of ``kinds`` (causal, window, softcap) and each length that is longer than the window.

    ``tokens`` are batch x length, ``width`` is heads x head dim.
    """
    return [
        Case("tune", max(1, tokens // n), max(1, width // d), max(1, width // d), n, d, *kind, layout="bnhd")
        for d in head_dims
        for kind in kinds
        for n in lengths
        if kind[1] is None or n > kind[1]
    ]


def kernels(case: Case, clock: Clock, total_ms: float, say: Say) -> Iterator[ranking.Measured]:
    """Forward and backward of a case by every kernel that takes it and gives the results of Triton's."""
    attn, attn_backward = torch.ops.flashbwd.attn, torch.ops.flashbwd.attn_backward
    query, key, value, grad_out = impls.inputs(case, "cuda")
    out, lse = attn(query, key, value, **case.options, kernel_name="triton")
    saved = (grad_out, None, query, key, value, out, lse)
    for kind in ("fwd", "bwd"):
        op, args = (attn, (query, key, value)) if kind == "fwd" else (attn_backward, saved)

        def call(name: str, op: Any = op, args: Any = args) -> Call:
            return lambda: op(*args, **case.options, kernel_name=name)

        ms = times({name: call(name) for name in KERNELS}, clock, total_ms, say)
        yield ranking.Measured.of(case, kind, ms)


def tiles(
    case: Case, clock: Clock, total_ms: float, say: Say, offer: Offer
) -> Iterator[tuple[Kind, dict[Config, float]]]:
    """(kernel, milliseconds of each tile that ``offer`` names) of Triton's kernels for a case."""
    query, key, value, grad_out = impls.inputs(case, "cuda")
    capability, limit = choice.device_limits(query.device.index)
    out, lse = triton_kernels.forward(query, key, value, **case.options)
    wanted = {"dq": (True, False, False, False), "dkdv": (False, True, True, False)}

    def call(kind: Kind, config: Config) -> Call:
        if kind == "fwd":
            return lambda: triton_kernels.forward(query, key, value, **case.options, config=config)
        options: dict[str, Any] = {f"{kind}_config": config, "grad_mask": wanted[kind], **case.options}
        return lambda: triton_kernels.backward(grad_out, None, query, key, value, out, lse, **options)

    block = triton_kernels.block_dim(case.head_dim)
    for kind in SHARE:
        found = offer(kind, capability, block, query.element_size(), limit)
        calls = {str(tuple(config)): call(kind, config) for config in found}
        ms = times(calls, clock, total_ms, lambda text, kind=kind: say(f"{kind} {text}"))  # type: ignore[misc]
        yield kind, {config: ms[str(tuple(config))] for config in found if str(tuple(config)) in ms}


def offered(kind: Kind, capability: int, block: int, itemsize: int, limit: int | None) -> tuple[Config, ...]:
    """What the package's table has for a GPU."""
    return configs(kind, capability, block, block, itemsize, limit)


def every(kind: Kind, capability: int, block: int, itemsize: int, limit: int | None) -> tuple[Config, ...]:
    """What the table has, then every tile that fits of the tables for other GPUs."""
    sizes = (capability, block, block, itemsize, limit)
    return tuple(dict.fromkeys([*configs(kind, *sizes), *fitting(kind, known(kind, max(64, block)), *sizes)]))


def times(calls: Mapping[str, Call], clock: Clock, total_ms: float, say: Say) -> dict[str, float]:
    """Milliseconds of each call that doesn't refuse, fail, or give other results than the first that works."""
    able: dict[str, Call] = {}
    expected: Sequence[Any] | None = None
    for name, call in calls.items():
        try:
            found = call()
        except NotImplementedError:
            continue
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            say(f"{name}: {in_one_line(error)[:170]}")
            continue
        if expected is None:
            expected = found
        if same(found, expected):
            able[name] = call
        else:
            say(f"{name}: other results than the first")
    return {name: statistics.median(ms) for name, ms in interleave(able, clock, ROUNDS, total_ms).items()}


def same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether results are equal but for rounding."""
    pairs = [(x.float(), y.float()) for x, y in zip(found, expected, strict=True) if y.numel()]
    return all(bool((x - y).norm() <= SAME * y.norm()) for x, y in pairs)


def ordered(cases: Sequence[Mapping[Config, float]]) -> list[Config]:
    """Tiles by the geometric mean over the cases of time over the case's best; those that failed once last."""

    def cost(config: Config) -> float:
        if not all(config in ms for ms in cases):
            return math.inf
        return sum(math.log(ms[config] / min(ms.values())) for ms in cases)

    return sorted(dict.fromkeys(c for ms in cases for c in ms), key=cost)
