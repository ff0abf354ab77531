"""Which kernel is the fastest where several compute the same: measurements as data, read by ``ops.choice``.

Kernels by name: "gluon" (Hopper, kernels/hopper), "triton" (the templates and their eager twins), "cudnn" and "flash"
(ATen's own).  A row says nothing of whether a kernel takes a problem.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

KERNELS = ("triton", "gluon", "cudnn", "flash")
Kind = Literal["fwd", "bwd"]
Band = Literal["full", "causal", "window"]


class Row(NamedTuple):
    """Problems for which ``kernels`` (fastest first) differ from the order of their architecture.

    ``head_dim`` is the wider of both, rounded up to 64, 128 or 256; ``lengths`` are the first and last number of keys.
    """

    kind: Kind
    head_dim: int
    band: Band
    lengths: tuple[int, int]
    kernels: tuple[str, ...]
    softcap: bool = False


# By the first digit of the compute capability.  9 measured on an H200 (torch 2.11, cuDNN 9.19).  The others are what
# SDPA takes there, so that nobody gets slower, and unmeasured.
ORDER: dict[int, tuple[str, ...]] = {
    8: ("flash", "triton"),
    9: ("gluon", "triton"),
    10: ("cudnn", "triton"),
}
ROWS: dict[int, tuple[Row, ...]] = {
    9: (
        Row("fwd", 128, "causal", (257, 767), ("cudnn", "gluon")),  # 334 TFLOP/s against 326 at 512
        Row("fwd", 64, "full", (513, 2047), ("cudnn", "gluon")),  # 426 TFLOP/s against 415 at 1024
        Row(
            "fwd", 64, "causal", (513, 2047), ("cudnn", "gluon")
        ),  # 333 at 1024, as much as 334; 432 against 448 at 4096
    ),
}


def order(architecture: int, kind: Kind, head_dim: int, band: Band, length: int, softcap: bool) -> tuple[str, ...]:
    """Kernels, fastest first; "triton" is always among the last."""
    first = first_row(ROWS.get(architecture, ()), kind, head_dim, band, length, softcap)
    return (*first, *ORDER.get(architecture, ()), "triton")


def first_row(
    rows: Iterable[Row], kind: Kind, head_dim: int, band: Band, length: int, softcap: bool
) -> tuple[str, ...]:
    """The kernels of the first row that a problem falls under; () if there is none."""
    bucket = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    for row in rows:
        if (row.kind, row.head_dim, row.band, row.softcap) == (kind, bucket, band, softcap) and (
            row.lengths[0] <= length <= row.lengths[1]
        ):
            return row.kernels
    return ()
