"""From times of kernels to rows of ``kernels/choices.py``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..kernels.choices import KERNELS, ORDER, Row
from .case import Case

PARTS = {"fwd": "forward", "bwd": "backward"}
MARGIN = 1.02  # times the architecture's own order must be beaten by
LONGEST = 2**31 - 1


class Measured(NamedTuple):
    """Milliseconds of each kernel that takes the problem."""

    kind: str
    head_dim: int
    band: str
    softcap: bool
    length: int
    ms: dict[str, float]

    @classmethod
    def of(cls, case: Case, kind: str, ms: dict[str, float]) -> Measured:
        band = "window" if case.window is not None else "causal" if case.causal else "full"
        return cls(kind, max(case.head_dim, case.value_dim), band, case.softcap is not None, case.length, ms)

    @property
    def problem(self) -> tuple[Any, ...]:
        """All but the length; the head dim as the table rounds it."""
        bucket = next((b for b in (64, 128) if self.head_dim <= b), 256)
        return self.kind, bucket, self.band, self.softcap


def from_cells(cells: Iterable[dict[str, Any]]) -> list[Measured]:
    """What a run of benchmarks/attention.py says of our kernels, the deterministic cases left out."""
    found = []
    for cell in cells:
        case = Case(**cell["case"])
        if case.deterministic:
            continue
        for kind, part in PARTS.items():
            named = {k: cell["impls"].get(f"ours:{k}", {}).get(part) for k in KERNELS}
            ms = {k: times["ms"] for k, times in named.items() if times is not None}
            if len(ms) > 1:
                found.append(Measured.of(case, kind, ms))
    return found


def ranking(measured: Sequence[Measured], architecture: int, always: bool = False) -> tuple[str, ...]:
    """Kernels, fastest first, over problems that differ in what the table doesn't know.

    () where the architecture's order will do, unless ``always``.

    By the sum over the problems of time over that problem's best; only kernels that ran in all of them are ranked.
    """
    kernels = [k for k in KERNELS if all(k in m.ms for m in measured)]
    cost = {k: sum(m.ms[k] / min(m.ms.values()) for m in measured) for k in kernels}
    if not cost:
        return ()
    if always:
        return tuple(sorted(cost, key=cost.__getitem__))
    default = next((k for k in (*ORDER.get(architecture, ()), "triton") if k in cost), None)
    best = min(cost, key=cost.__getitem__)
    if default is not None and cost[default] <= MARGIN * cost[best]:
        return ()
    ranked = sorted(cost, key=cost.__getitem__)
    return tuple(ranked[: ranked.index(default) + 1]) if default is not None else tuple(ranked)


def rows(measured: Sequence[Measured], architecture: int, always: bool = False) -> list[Row]:
    """The rows of the table, with ``always`` for every problem.

    A length stands for those nearer to it than to its neighbours, by their ratio.
    """
    problems: dict[tuple[Any, ...], dict[int, list[Measured]]] = {}
    for m in measured:
        problems.setdefault(m.problem, {}).setdefault(m.length, []).append(m)
    table: list[Row] = []
    for (kind, head_dim, band, softcap), by_length in sorted(problems.items()):
        lengths = sorted(by_length)
        ends = [int((a * b) ** 0.5) for a, b in itertools.pairwise(lengths)] + [LONGEST]
        begins = [0, *(end + 1 for end in ends)]
        mine: list[Row] = []
        for length, begin, end in zip(lengths, begins, ends, strict=False):
            kernels = ranking(by_length[length], architecture, always)
            if not kernels:
                continue
            if mine and mine[-1].kernels == kernels and mine[-1].lengths[1] + 1 == begin:
                mine[-1] = mine[-1]._replace(lengths=(mine[-1].lengths[0], end))
            else:
                mine.append(Row(kind, head_dim, band, (begin, end), kernels, softcap))
        table += mine
    return table


def row_text(row: Row) -> str:
    """A row as it stands in the table's source."""
    softcap = ", softcap=True" if row.softcap else ""
    kernels = ", ".join(f'"{k}"' for k in row.kernels) + ("," if len(row.kernels) == 1 else "")
    return f'Row("{row.kind}", {row.head_dim}, "{row.band}", {row.lengths}, ({kernels}){softcap}),'
