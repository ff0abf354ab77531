"""Launch of the Hopper forward, and what the Hopper kernels take."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from .._compat import cuda_driver
from ..spec import MaskSpec
from .launch import Launch
from .layout import has_wide_rows

LOG2E = 1.4426950408889634
# Scores capped at c are exponents in [-c, c]: exp2 of them and its sums stay in the range of float32 and bfloat16, with
# 2**47 to spare for length and values.
_LARGEST_EXPONENT = 80.0
# Beyond, a row's largest exponent is rounded by more than fp16's range takes: see ``row_factor`` in kernels/forward.py.
_LARGEST_ROUNDED = 2.0**28
_L2_BYTES = 28 << 20  # of keys and values that stay in the 50 MB of L2 while others pass through


@dataclass(frozen=True)
class Config:
    """How the forward is tiled: ``warpgroups`` of 64 query rows, blocks of ``block_n`` keys, ``stages`` of them loaded.

    ``registers`` are those of a computing thread.  ``ping_pong``: warpgroups take turns.
    ``out_in_query``: the result leaves through the query's shared memory.  ``per_sm``: thread blocks on a
    multiprocessor.
    """

    warpgroups: int = 2
    block_n: int = 128
    stages: int = 2
    registers: int = 240
    ping_pong: bool = True
    out_in_query: bool = False
    per_sm: int = 1


# The table: by the shared memory tile's columns (the wider head dim) and kind of mask, the first config whose longest
# length of keys is not exceeded.  Short bands want small blocks, of which they waste less.  Measured on an H200.
_NARROW = 256  # keys that a row sees at most under a "narrow" mask
_TURNS = Config()
_THREE = Config(warpgroups=3, stages=3, registers=160)
_SMALL = Config(warpgroups=1, block_n=64, stages=3, ping_pong=False, per_sm=3)
_CONFIGS: dict[tuple[int, str], tuple[tuple[float, Config], ...]] = {
    (64, "full"): ((2047, _THREE), (math.inf, replace(_THREE, ping_pong=False))),
    (64, "upper"): ((2047, _SMALL), (8191, _THREE), (math.inf, replace(_THREE, ping_pong=False))),
    (64, "lower"): ((2047, _SMALL), (math.inf, _THREE)),
    (64, "narrow"): ((math.inf, _SMALL),),
    **dict.fromkeys(((128, "full"), (128, "upper"), (128, "lower")), ((math.inf, _TURNS),)),
    (128, "narrow"): ((math.inf, replace(_TURNS, block_n=64, stages=4, ping_pong=False)),),
    **{(256, kind): ((math.inf, replace(_TURNS, block_n=64)),) for kind in ("full", "upper", "lower", "narrow")},
}


def takes(
    kind: Literal["fwd", "bwd"],
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    capability: int,
    scale: float | None,
) -> bool:
    """Whether the Hopper kernels compute this, whatever the lengths.  ``capability`` is 90 for an H100."""
    dims = (head_dim, v_head_dim)
    return (
        capability // 10 == 9
        and dtype in (torch.bfloat16, torch.float16)
        and all(isinstance(d, int) and d % 8 == 0 and 8 <= d <= 256 for d in dims)
        and (kind == "fwd" or head_dim == v_head_dim or max(dims) > 128)
        and (scale is None or scale > 0)
        and _has_gluon()
    )


@lru_cache
def _has_gluon() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        from ..kernels.hopper import forward  # noqa: F401
    except (ImportError, AttributeError):  # Gluon is experimental: another Triton may lack a name
        return False
    return True


def aligned(*tensors: Tensor) -> bool:
    """Whether TMA can read and write these [batch, heads, length, head dim] tensors: 16-byte steps in all dims."""
    return all(x.data_ptr() % 16 == 0 and has_wide_rows(x) for x in tensors)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    counter: Tensor,
    *,
    scale: float,
    mask: MaskSpec,
    softcap: float | None,
    config: Config | None = None,
    processors: int | None = None,
) -> list[Launch]:
    """What writes out and lse (fp32 [batch, heads, q_len], contiguous); rows that see nothing get 0 and -inf.

    For what :func:`takes` and :func:`aligned` agree to, ``out`` included.  ``counter`` is that of the stream:
    :func:`tile_counter`.  ``config`` overrides the table, ``processors`` the device's number of them.

    Where nothing is seen at all, the results are written here and nothing is left to launch.
    """
    if lse.numel() == 0:
        return []
    batch, heads, q_len, head_dim = query.shape
    kv_len = key.shape[2]
    lower, upper = mask.lower, mask.upper
    if _sees_nothing(q_len, kv_len, lower, upper):
        out.zero_()
        lse.fill_(-float("inf"))
        return []
    # Keys that no row sees may hold anything: they aren't loaded.
    if lower is not None and lower > 0:
        key, value = key[:, :, lower:], value[:, :, lower:]
        lower, upper = 0, None if upper is None else upper - lower
    if upper is not None and q_len + upper < key.shape[2]:
        key, value = key[:, :, : q_len + upper], value[:, :, : q_len + upper]
    kv_heads, kv_len, v_head_dim = value.shape[1:]
    plan = _plan(
        batch, heads, kv_heads, q_len, kv_len, head_dim, v_head_dim, lower, upper, softcap is not None,
        softcap is not None and softcap * LOG2E <= _LARGEST_EXPONENT and query.dtype is torch.bfloat16,
        processors_of(query.device.index) if processors is None else processors, config,
    )  # fmt: skip
    inner, factor = (0.0, scale * LOG2E) if softcap is None else (scale / softcap, softcap * LOG2E)
    describe = plan.describe
    arguments = (
        describe(query, 64, plan.width), describe(key, plan.block_n, plan.width),
        describe(value, plan.block_n, plan.v_width), describe(out, 64, plan.v_width),
        lse, counter, *plan.sizes, inner, factor, 2.0 ** math.frexp(factor)[1], _LARGEST_ROUNDED / factor,
    )  # fmt: skip
    return [Launch(plan.kernel, plan.constants, (plan.blocks,), arguments)]


@dataclass(frozen=True)
class Plan:
    """All of a launch that depends on shapes alone."""

    kernel: Any
    constants: dict[str, Any]
    blocks: int
    sizes: tuple[int, ...]
    block_n: int
    width: int
    v_width: int
    describe: Callable[[Tensor, int, int], Any]


@lru_cache(maxsize=4096)
def _plan(
    batch: int,
    heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    v_head_dim: int,
    lower: int | None,
    upper: int | None,
    has_softcap: bool,
    bounded: bool,
    processors: int,
    config: Config | None,
) -> Plan:
    from ..kernels.hopper.device import tile_descriptor
    from ..kernels.hopper.forward import forward_kernel

    # A bound that hides nothing is none.
    lower = None if lower is None or lower <= 1 - q_len else lower
    upper = None if upper is None or upper >= kv_len - 1 else upper
    width, v_width = tile_columns(head_dim), tile_columns(v_head_dim)
    c = config or _config(width, v_width, kv_len, _kind(lower, upper))
    group = heads // kv_heads
    blocks_m = -(-q_len // (64 * c.warpgroups))
    tiles = blocks_m * batch * heads
    resident = _L2_BYTES // (kv_len * (width + v_width) * 2)
    head_set = max(1, min(kv_heads * batch, resident)) * group
    sizes = (tiles, blocks_m, head_set, batch * heads, heads, group, q_len, kv_len, lower or 0, upper or 0)
    qk_first, qk_second = split(head_dim)
    v_first, v_second = split(v_head_dim)
    constants = {
        "HAS_LOWER": lower is not None,
        "HAS_UPPER": upper is not None,
        "RAGGED": is_ragged(q_len, kv_len, upper, c.block_n),
        "NARROW": lower is not None and upper is not None and upper - lower < c.block_n + 62,
        "SOFTCAP": has_softcap,
        "BOUNDED": bounded,
        "QK_FIRST": qk_first,
        "QK_SECOND": qk_second,
        "V_FIRST": v_first,
        "V_SECOND": v_second,
        "WARPGROUPS": c.warpgroups,
        "BLOCK_N": c.block_n,
        "STAGES": c.stages,
        "PING_PONG": c.ping_pong,
        "OUT_IN_QUERY": c.out_in_query,
        "ROW_FASTEST": lower is None and upper is None,
        "REGISTERS": c.registers,
        "num_warps": 4,
    }
    if c.per_sm > 1:
        threads = 128 * (c.warpgroups + 1)
        constants["maxnreg"] = 65536 // (threads * c.per_sm) // 8 * 8
    blocks = min(tiles, processors * c.per_sm)
    return Plan(forward_kernel, constants, blocks, sizes, c.block_n, width, v_width, tile_descriptor)


def _kind(lower: int | None, upper: int | None) -> str:
    if lower is None:
        return "full" if upper is None else "upper"
    return "narrow" if upper is not None and upper - lower < _NARROW else "lower"


def _config(width: int, v_width: int, kv_len: int, kind: str) -> Config:
    c = next(config for longest, config in _CONFIGS[max(width, v_width), kind] if kv_len <= longest)
    # Two tiles of 256 columns leave no shared memory for one of the result.
    return replace(c, out_in_query=True) if width == v_width == 256 else c


def is_ragged(q_len: int, kv_len: int, upper: int | None, block: int) -> bool:
    """Whether keys have to be told from what is behind the last one, in a block that it doesn't fill.

    An upper bound that ends before them hides those from every row: one kernel less.
    """
    return kv_len % block != 0 and (upper is None or q_len + upper > kv_len)


def tile_columns(dim: int) -> int:
    """Columns of the shared memory tile that holds a head dim."""
    return 64 if dim <= 64 else 128 if dim <= 128 else 256


def split(dim: int) -> tuple[int, int]:
    """A head dim as one or two powers of two, so that products needn't be as wide as the tile."""
    for first, seconds in ((64, (0, 16, 32)), (128, (0, 16, 32, 64)), (256, (0,))):
        for second in seconds:
            if dim <= first + second:
                return first, second
    raise ValueError(f"head dim: expected at most 256, got {dim}")


def _sees_nothing(q_len: int, kv_len: int, lower: int | None, upper: int | None) -> bool:
    """Whether no query sees a key."""
    low = -q_len if lower is None else lower
    high = kv_len if upper is None else upper
    return kv_len == 0 or low > high or low >= kv_len or high <= -q_len


@lru_cache
def processors_of(device: int) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


_counters: dict[tuple[int, int], Tensor] = {}


def tile_counter(device: int) -> Tensor:
    """What the forward's blocks of threads count tiles with on the current stream of the current device: int32 [1].

    0 between launches.  While a graph is captured, one of its own: two graphs may be replayed at once.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device="cuda")
    place = (device, cuda_driver.raw_stream(device))
    counter = _counters.get(place)
    if counter is None:
        # It stays for ever, so it mustn't be in the pool of a graph that is about to be captured, where this thread (or
        # its stream, depending on torch) may be allocating now: another thread and its default stream are not.
        with ThreadPoolExecutor(1) as other:
            counter = _counters[place] = other.submit(_zero, device).result()
    return counter


def _zero(device: int) -> Tensor:
    with torch.cuda.device(device):
        zero = torch.zeros(1, dtype=torch.int32, device="cuda")
        torch.cuda.current_stream().synchronize()
    return zero
