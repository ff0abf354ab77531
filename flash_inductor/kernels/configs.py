"""Tuning table: which tile sizes, warps and pipeline stages each kernel runs with.  Data, not code.

The first config of an entry is what eager launches; the whole list is what autotuning tries.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Kind = Literal["fwd", "dq", "dkdv", "dbias"]
KINDS: tuple[Kind, ...] = ("fwd", "dq", "dkdv", "dbias")


class Config(NamedTuple):
    """Tile of query rows, tile of key rows, warps, software pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Tables go by the padded head dim (64 serves everything below it too).
# Measured on an H200 with bf16, causal and full, N = 4096 (benchmarks/README.md says how).
_HOPPER: dict[Kind, dict[int, tuple[Config, ...]]] = {
    "fwd": {
        64: (Config(64, 64, 4, 3), Config(128, 64, 4, 3), Config(64, 128, 4, 3), Config(64, 64, 4, 2)),
        128: (Config(64, 64, 4, 3), Config(128, 128, 8, 3), Config(128, 64, 8, 3), Config(64, 64, 4, 2)),
        256: (Config(128, 64, 8, 2), Config(128, 32, 8, 3), Config(64, 32, 4, 3)),
    },
    "dq": {
        64: (Config(64, 64, 4, 3), Config(128, 64, 4, 3), Config(64, 32, 4, 3)),
        128: (Config(64, 64, 4, 2), Config(128, 64, 8, 3), Config(64, 32, 4, 3)),
        256: (Config(128, 32, 8, 3), Config(128, 32, 8, 2), Config(64, 32, 4, 3)),
    },
    "dkdv": {
        64: (Config(32, 64, 4, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 2), Config(32, 128, 4, 2)),
        128: (
            Config(32, 64, 4, 3),
            Config(64, 64, 4, 2),
            Config(64, 128, 8, 3),
            Config(64, 128, 8, 2),
            Config(32, 64, 8, 2),
        ),
        256: (Config(64, 64, 8, 2), Config(32, 64, 8, 2), Config(64, 64, 8, 1)),
    },
    "dbias": {
        64: (Config(64, 64, 4, 2), Config(128, 64, 8, 2), Config(64, 64, 4, 1)),
        128: (Config(64, 64, 4, 2), Config(64, 64, 8, 2), Config(64, 64, 4, 1)),
        256: (Config(64, 64, 8, 1), Config(64, 32, 4, 1)),
    },
}
# Unmeasured: Hopper's table, but for the one tile that doesn't spill there.
_BLACKWELL: dict[Kind, dict[int, tuple[Config, ...]]] = {
    **_HOPPER,
    "dkdv": {**_HOPPER["dkdv"], 128: (Config(32, 64, 8, 2), *_HOPPER["dkdv"][128])},
}
_AMPERE: dict[Kind, dict[int, tuple[Config, ...]]] = {
    "fwd": {
        64: (Config(128, 64, 4, 3), Config(64, 64, 4, 3), Config(128, 32, 4, 3)),
        128: (Config(128, 64, 8, 3), Config(64, 64, 4, 3), Config(128, 32, 4, 2)),
        256: (Config(64, 32, 4, 2), Config(64, 64, 8, 2), Config(32, 32, 4, 1)),
    },
    "dq": {
        64: (Config(64, 64, 4, 2), Config(128, 32, 4, 2)),
        128: (Config(64, 32, 4, 2), Config(128, 32, 8, 2)),
        256: (Config(64, 32, 8, 1), Config(32, 32, 4, 1)),
    },
    "dkdv": {
        64: (Config(32, 64, 4, 2), Config(64, 64, 4, 2), Config(32, 128, 8, 2)),
        128: (Config(32, 64, 8, 2), Config(32, 64, 4, 2), Config(32, 128, 8, 2)),
        256: (Config(32, 32, 8, 1), Config(16, 64, 8, 1)),
    },
    "dbias": {
        64: (Config(64, 64, 4, 2), Config(64, 64, 4, 1), Config(32, 64, 4, 2)),
        128: (Config(64, 64, 4, 1), Config(64, 32, 4, 1), Config(32, 32, 4, 1)),
        256: (Config(32, 32, 4, 1), Config(16, 32, 4, 1)),
    },
}
# What fits everything Triton runs on; fp32 inputs land here too.
_SMALL: dict[Kind, dict[int, tuple[Config, ...]]] = {
    "fwd": {
        64: (Config(64, 32, 4, 2), Config(32, 32, 4, 1)),
        128: (Config(64, 32, 4, 1), Config(32, 16, 4, 1)),
        256: (Config(32, 16, 4, 1), Config(16, 16, 4, 1)),
    },
    "dq": {
        64: (Config(32, 32, 4, 1), Config(16, 16, 4, 1)),
        128: (Config(32, 32, 4, 1), Config(16, 16, 4, 1)),
        256: (Config(16, 16, 4, 1),),
    },
    "dkdv": {
        64: (Config(32, 32, 4, 1), Config(16, 16, 4, 1)),
        128: (Config(32, 32, 4, 1), Config(16, 16, 4, 1)),
        256: (Config(16, 16, 4, 1),),
    },
    "dbias": {
        64: (Config(32, 32, 4, 1), Config(16, 16, 4, 1)),
        128: (Config(32, 32, 4, 1), Config(16, 16, 4, 1)),
        256: (Config(16, 16, 4, 1),),
    },
}


def shared_memory_bytes(
    kind: Kind, config: Config, block_d: int, block_dv: int, itemsize: int, capability: int = 100, pair_bytes: int = 0
) -> int:
    """An estimate, from above on the architectures tried, of the shared memory a kernel asks for.

    ``capability`` as in :func:`configs`: before Blackwell, p and ds stay in registers on their way to the next product.
    """
    m, n, _, stages = config
    streamed = n if kind != "dkdv" else m
    resident = m if kind != "dkdv" else n
    dims = block_d + block_dv
    kept = resident * (block_d if kind == "fwd" else dims)
    if kind == "dbias":  # everything streams: the loop goes over what the bias is broadcast over
        streamed, kept = m + n, 0
    exchanged = 0
    if kind != "fwd" and capability >= 100:
        exchanged = m * n + streamed * dims  # p and ds, and the streamed tiles a second time, for the other products
    elif kind == "dkdv" and stages == 1:
        exchanged = streamed * max(block_d, block_dv)  # q or do a second time, transposed
    return itemsize * (kept + stages * streamed * dims + exchanged) + pair_bytes * stages * m * n + 2048


def configs(
    kind: Kind,
    capability: int,
    block_d: int,
    block_dv: int,
    itemsize: int,
    max_shared_memory: int | None = None,
    pair_bytes: int = 0,
) -> tuple[Config, ...]:
    """The configs to try, best guess first; never empty: where nothing fits, the smallest tile there is.

    Args:
        kind: "fwd", "dq", "dkdv" or "dbias".
        capability: compute capability as major * 10 + minor (90 for H100), 0 if there is none.
        block_d, block_dv: padded head dims of query/key and of value.
        itemsize: bytes of an input element.
        max_shared_memory: bytes a block may use; None means no limit.
        pair_bytes: bytes of bias, mask and dropout for each pair of a query and a key.
    """
    bucket = max(64, block_d, block_dv)
    tables = [_SMALL] if itemsize > 2 else [{9: _HOPPER, 10: _BLACKWELL}.get(capability // 10, _AMPERE), _SMALL]
    for table in tables:
        found = fitting(
            kind, table[kind][bucket], capability, block_d, block_dv, itemsize, max_shared_memory, pair_bytes
        )
        if found:
            return found
    return (_SMALL[kind][bucket][-1],)


def fitting(
    kind: Kind,
    offered: tuple[Config, ...],
    capability: int,
    block_d: int,
    block_dv: int,
    itemsize: int,
    max_shared_memory: int | None = None,
    pair_bytes: int = 0,
) -> tuple[Config, ...]:
    """Those of ``offered`` that the device has the shared memory for; other arguments as in :func:`configs`."""
    if pair_bytes:
        offered = _narrow(kind, max(64, block_d, block_dv), offered)
    limit = math.inf if max_shared_memory is None else max_shared_memory
    sizes = (block_d, block_dv, itemsize, capability, pair_bytes)
    return tuple(c for c in offered if shared_memory_bytes(kind, c, *sizes) <= limit)


def known(kind: Kind, bucket: int) -> tuple[Config, ...]:
    """Every tile that some table has for a kernel at a padded head dim of 64, 128 or 256."""
    tables = (_HOPPER, _BLACKWELL, _AMPERE, _SMALL)
    return tuple(dict.fromkeys(c for table in tables for c in table[kind][bucket]))


def _narrow(kind: Kind, bucket: int, table: tuple[Config, ...]) -> tuple[Config, ...]:
    """Without the tiles that give a thread many pairs: what is read or drawn for each pair would spill.

    Two wide accumulators leave few registers: 1 KiB a thread spilled in a 32 x 64 tile of dK and dV with 4 warps.
    """
    most = 8 if kind == "dkdv" and bucket > 64 else 32
    narrow = tuple(c for c in table if c.block_m * c.block_n <= most * 32 * c.num_warps)
    return narrow or table
