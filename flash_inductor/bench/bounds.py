"""Which errors are acceptable."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Above this a result isn't attention with rounding, but something else; also the bound where no peer ran.
WRONG = {"bfloat16": 3e-2, "float16": 4e-3, "float32": 1e-3}
BOUND = 2.0  # times the error of the best peer
# Below this an error is as good as none: it is a few roundings of float32, and ratios of such errors say nothing.
FLOOR = 1e-6


def is_wrong(dtype: str, errors: dict[str, float]) -> bool:
    """Whether these are errors of a result that isn't attention, rather than of rounding.  NaN is wrong."""
    return not all(error <= WRONG[dtype] for error in errors.values())


def inaccurate(mine: dict[str, float], peers: Sequence[dict[str, float]], dtype: str) -> dict[str, float]:
    """{result: its error over the best peer's} where that is above BOUND, or above WRONG where there is no peer."""
    found = {}
    for name, error in mine.items():
        best = max(FLOOR, min((peer[name] for peer in peers), default=WRONG[dtype] / BOUND))
        if not error <= BOUND * best:
            found[name] = error / best if math.isfinite(error) else math.inf
    return found
