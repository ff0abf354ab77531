"""Which kernel is the fastest where several compute the same: measurements as data, read by ``ops.choice``.

Kernels by name: "gluon" (Hopper, kernels/hopper), "triton" (the templates and their eager twins), "cudnn" and "flash"
(ATen's own).  A row says nothing of whether a kernel takes a problem.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

KERNELS = ("triton", "gluon", "cudnn", "flash")
Kind = Literal["fwd", "bwd"]
Band = Literal["full", "causal", "window"]


class Row(NamedTuple):
    """Problems for which ``kernels`` (fastest first) differ from the order of their architecture.

    ``head_dim`` is the wider of both, rounded up to 64, 128 or 256; ``lengths`` are the first and last number of keys;
    ``least_pairs`` of a query and a key, in all batch entries and heads, hidden ones included; ``head_dims`` of query
    and value, where a row is for no others.
    """

    kind: Kind
    head_dim: int
    band: Band
    lengths: tuple[int, int]
    kernels: tuple[str, ...]
    softcap: bool = False
    least_pairs: int = 0
    head_dims: tuple[int, int] | None = None


# With less to do, a GPU waits for its host, where a call of cuDNN takes 30 microseconds longer than one of ours: 1.3 to
# 1.5 times stock's on an H200 (benchmarks/overhead.py).  As many pairs take about 0.05 ms.
_BUSY = 1 << 26
# By the first digit of the compute capability.  9 measured on an H200 (torch 2.11, cuDNN 9.19).  The others are what
# SDPA takes there, so that nobody gets slower, and unmeasured.
ORDER: dict[int, tuple[str, ...]] = {
    8: ("flash", "triton"),
    9: ("gluon", "triton"),
    10: ("cudnn", "triton"),
}
ROWS: dict[int, tuple[Row, ...]] = {
    9: (
        # 334 TFLOP/s against 326 at 512
        Row("fwd", 128, "causal", (257, 767), ("cudnn", "gluon"), least_pairs=_BUSY),
        # 426 against 415 at 1024
        Row("fwd", 64, "full", (513, 2047), ("cudnn", "gluon"), least_pairs=_BUSY),
        # 333 at 1024, as much as 334; 432 against 448 at 4096
        Row("fwd", 64, "causal", (513, 2047), ("cudnn", "gluon"), least_pairs=_BUSY),
        # Multi-head latent attention.  575 against 567 at 4096, as much at 2048, 606 against 643 at 8192
        Row("fwd", 256, "causal", (3072, 6143), ("cudnn", "gluon"), least_pairs=_BUSY, head_dims=(192, 128)),
        # 660 against 651 at 4096, 571 against 584 at 1024
        Row("fwd", 256, "full", (3072, 6143), ("cudnn", "gluon"), least_pairs=_BUSY, head_dims=(192, 128)),
        # 203 against 171 at 512, 448 against 395 at 4096, 536 against 432 at 16384
        Row("bwd", 256, "causal", (512, 1 << 30), ("cudnn", "gluon"), least_pairs=_BUSY, head_dims=(192, 128)),
    ),
}


def order(
    architecture: int,
    kind: Kind,
    head_dims: tuple[int, int],
    band: Band,
    length: int,
    softcap: bool,
    pairs: float = math.inf,
) -> tuple[str, ...]:
    """Kernels, fastest first; "triton" is always among the last.  ``head_dims`` of query and value."""
    first = first_row(ROWS.get(architecture, ()), kind, head_dims, band, length, softcap, pairs)
    return (*first, *ORDER.get(architecture, ()), "triton")


def first_row(
    rows: Iterable[Row],
    kind: Kind,
    head_dims: tuple[int, int],
    band: Band,
    length: int,
    softcap: bool,
    pairs: float = math.inf,
) -> tuple[str, ...]:
    """The kernels of the first row that a problem falls under; () if there is none."""
    widest = max(head_dims)
    bucket = 64 if widest <= 64 else 128 if widest <= 128 else 256
    for row in rows:
        same = (row.kind, row.head_dim, row.band, row.softcap) == (kind, bucket, band, softcap)
        same = same and row.head_dims in (None, head_dims)
        if same and row.lengths[0] <= length <= row.lengths[1] and pairs >= row.least_pairs:
            return row.kernels
    return ()
