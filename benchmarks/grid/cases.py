"""The grid: which attention problems are measured, in which order, and what peers reached on them before."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from flash_inductor.bench.case import Case


def _anchors() -> list[Case]:
    rows: list[tuple[Any, ...]] = [
        (4, 16, 16, 4096, 128, False),
        (4, 16, 16, 4096, 128, True),
        (1, 16, 16, 16384, 128, True),
        (4, 32, 32, 4096, 64, False),
        (4, 32, 32, 4096, 64, True),
        (4, 32, 8, 4096, 128, True),
        (4, 8, 8, 4096, 256, True),
        (16, 16, 16, 1024, 128, True),
        (1, 32, 8, 16384, 128, True, 1024),
        (4, 32, 8, 4096, 128, True, None, 50.0),
        (4, 16, 8, 4096, 256, True, None, 50.0),
        (2, 16, 8, 8192, 256, True, 4095, 50.0),
        (4, 32, 8, 4096, 64, True, 128),
        (4, 16, 16, 4096, 64, False, 64),
    ]
    return [Case("anchors", *row) for row in rows]


# TFLOP/s (forward, backward) of peers on one H200 in an earlier run, bf16, torch 2.11, cuDNN 9.19.  "stock" is SDPA
# with a dense mask for windows, and the compiled eager formula for softcap.
_PUBLISHED: list[dict[str, tuple[int, int]]] = [
    {"flash": (337, 289), "cudnn": (599, 497), "flex": (458, 391), "fa4": (651, 558)},
    {"flash": (302, 255), "cudnn": (515, 442), "flex": (364, 345), "fa4": (563, 517)},
    {"flash": (320, 309), "cudnn": (550, 513), "flex": (403, 378), "fa4": (629, 593)},
    {"flash": (301, 268), "cudnn": (447, 430), "flex": (398, 314), "fa4": (535, 496)},
    {"flash": (280, 232), "cudnn": (413, 370), "flex": (345, 271), "fa4": (438, 451)},
    {"flash": (318, 255), "cudnn": (523, 444), "flex": (382, 339), "fa4": (572, 487)},
    {"flash": (282, 217), "cudnn": (567, 341), "flex": (280, 131), "fa4": (631, 337)},
    {"flash": (246, 170), "cudnn": (420, 312), "flex": (265, 253), "fa4": (398, 347)},
    {"stock": (18, 18), "flex": (317, 293), "fa4": (485, 390)},
    {"stock": (54, 108), "flex": (187, 169), "fa4": (287, 351)},
    {"stock": (98, 186), "flex": (164, 98), "fa4": (434, 306)},
    {"flex": (167, 100), "fa4": (433, 333)},
    {"stock": (8, 8), "flex": (98, 75), "fa4": (106, 78)},
    {"flex": (61, 56), "fa4": (46, 63)},
]
PUBLISHED = {str(case): peers for case, peers in zip(_anchors(), _PUBLISHED, strict=True)}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


def _sweep() -> list[Case]:
    """N from 512 to 64k at 16k tokens and 2048 features; lengths that say most about the curve come first."""
    first = {1024: 1, 16384: 1, 512: 2, 65536: 3}
    return [
        Case(
            "lengths", max(1, 16384 // n), 2048 // d, 2048 // d, n, d, causal, layout="bnhd",
            importance=first.get(n, 4),
        )
        for d in (128, 64)
        for causal in (True, False)
        for n in LENGTHS
    ]  # fmt: skip


def _variants() -> list[Case]:
    dims = [
        Case("head dims", 4, 16, 16, 4096, d, causal, v_head_dim=dv, importance=2)
        for d, dv in ((96, 0), (192, 128), (256, 0))
        for causal in (True, False)
        if (d, causal) != (256, True)  # an anchor
    ]
    return [
        *dims,
        Case("deterministic", 2, 16, 16, 8192, 128, True, deterministic=True, importance=1),
        Case("deterministic", 2, 32, 32, 8192, 64, True, deterministic=True, importance=3),
        Case("deterministic", 4, 16, 16, 4096, 128, False, deterministic=True, importance=3),
        Case("float16", 4, 16, 16, 4096, 128, True, dtype="float16", importance=2),
        Case("float16", 4, 32, 8, 4096, 64, False, dtype="float16", importance=3),
    ]


def grid() -> list[Case]:
    """Every case, the most important first."""
    return sorted([*_anchors(), *_variants(), *_sweep()], key=lambda case: case.importance)


def tiny_grid() -> list[Case]:
    """Toy sizes with every feature, to try the scripts on a CPU."""
    return [
        Case("anchors", 1, 2, 2, 128, 16, True, dtype="float32"),
        Case("anchors", 1, 4, 2, 128, 16, True, 32, dtype="float32"),
        Case("anchors", 1, 2, 2, 128, 16, False, None, 5.0, dtype="float32"),
        Case("head dims", 1, 2, 2, 128, 24, False, 32, v_head_dim=16, dtype="float32", layout="bnhd"),
    ]


def select(cases: Iterable[Case], pattern: str) -> list[Case]:
    """The cases whose "group: name" the regular expression is found in; ValueError if it is none, or finds none."""
    try:
        found = [case for case in cases if re.search(pattern, f"{case.group}: {case}")]
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    if not found:
        raise ValueError(f"no case matches {pattern!r}; --list prints them")
    return found


def partition(tasks: Sequence[tuple[Case, str]], weights: dict[str, float], workers: int) -> list[list[Any]]:
    """Tasks (case, implementation) for each worker, about equally heavy.

    What compiles the same kernels stays together, because two workers would both compile them: our implementations
    of cases that differ in sizes only.
    """
    groups: dict[Any, list[tuple[Case, str]]] = {}
    for case, impl in tasks:
        features = (case.head_dim, case.value_dim, case.causal, case.window is None, case.softcap is None, case.dtype)
        key = ("ours", *features, case.deterministic) if impl.startswith("ours") else (impl, case)
        groups.setdefault(key, []).append((case, impl))

    def weight(group: list[tuple[Case, str]]) -> float:
        """The first of an implementation compiles the kernels, the others little more than what calls them."""
        counts = Counter(impl for _, impl in group)
        return sum(weights.get(impl, 1.0) * (1 + 0.3 * (count - 1)) for impl, count in counts.items())

    loads: list[list[Any]] = [[0.0, []] for _ in range(workers)]
    for group in sorted(groups.values(), key=weight, reverse=True):
        lightest = min(loads, key=lambda load: load[0])
        lightest[0] += weight(group)
        lightest[1] += group
    return [tasks for _, tasks in loads]
