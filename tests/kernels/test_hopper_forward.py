"""The Hopper forward compiled for sm_90a: nothing serialises its products, nearly nothing spills, all of it fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_inductor.ops import hopper

from .pretend import compile_for_hopper
from .test_compile import SHARED_MEMORY, check_hopper, resources

# name: (head dim, of value, lower, upper, softcap, length of keys, dtype, bytes a thread may spill)
_CASES: dict[str, tuple[int, int, int | None, int | None, float | None, int, torch.dtype, int]] = {
    "64": (64, 64, None, None, None, 1024, torch.bfloat16, 0),
    "64_causal": (64, 64, None, 0, None, 1000, torch.bfloat16, 0),
    # Three warpgroups have 160 registers each; what spills, spills in cut blocks only.
    "64_causal_long": (64, 64, None, 0, None, 16384, torch.bfloat16, 192),
    "64_narrow": (64, 64, -127, 0, None, 1024, torch.bfloat16, 0),
    "80_causal": (80, 80, None, 0, None, 1024, torch.bfloat16, 16),
    "128_window_softcap": (128, 128, -300, 0, 20.0, 1000, torch.bfloat16, 16),
    "128_softcap_fp16": (128, 128, None, 0, 20.0, 1024, torch.float16, 16),
    "192_128_causal": (192, 128, None, 0, None, 1024, torch.bfloat16, 16),
    "256_window_softcap": (256, 256, -300, 0, 20.0, 1000, torch.bfloat16, 48),
}


@pytest.mark.parametrize("name", _CASES)
def test_compiles(name: str) -> None:
    dim, v_dim, lower, upper, softcap, kv_len, dtype, spilled = _CASES[name]
    call = _call(dim, v_dim, lower, upper, softcap, kv_len, dtype)
    found = resources(compile_for_hopper(call.kernel, call.args, call.constants))
    check_hopper(found, spilled)


def _call(
    dim: int, v_dim: int, lower: int | None, upper: int | None, softcap: float | None, kv_len: int, dtype: torch.dtype
) -> Any:
    query = torch.empty(1, 2, 1024, dim, dtype=dtype)
    key, value = torch.empty(1, 2, kv_len, dim, dtype=dtype), torch.empty(1, 2, kv_len, v_dim, dtype=dtype)
    out, lse = torch.empty(1, 2, 1024, v_dim, dtype=dtype), torch.empty(1, 2, 1024)
    counter = torch.zeros(1, dtype=torch.int32)
    mask = hopper.MaskSpec(lower, upper)
    (call,) = hopper.forward(
        query, key, value, out, lse, counter, scale=dim**-0.5, mask=mask, softcap=softcap, processors=132
    )
    return call


@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_head_dims_are_covered(dim: int) -> None:
    first, second = hopper.split(dim)
    assert dim <= first + second <= hopper.tile_columns(dim)
    assert first + second < dim + (64 if dim > 64 else 65)


def test_shared_memory_of_every_pair_of_head_dims() -> None:
    for width in (64, 128, 256):
        for v_width in (64, 128, 256):
            for kv_len in (128, 100_000):
                for kind in ("full", "upper", "lower", "narrow"):
                    c = hopper._config(width, v_width, kv_len, kind)
                    out = 0 if c.out_in_query else v_width
                    elements = 64 * c.warpgroups * (width + out) + c.stages * c.block_n * (width + v_width)
                    assert c.per_sm * (2 * elements + 1024) <= SHARED_MEMORY[90], (width, v_width, c)
                    assert not (c.out_in_query and width < v_width)
                    assert c.warpgroups >= 2 or not c.ping_pong


def test_takes() -> None:
    good: dict[str, Any] = {"kind": "fwd", "head_dim": 64, "v_head_dim": 64, "dtype": torch.bfloat16}
    good |= {"capability": 90, "scale": 0.1}
    assert hopper.takes(**good) and hopper.takes(**{**good, "v_head_dim": 128, "scale": None, "dtype": torch.float16})
    bad: list[dict[str, Any]] = [
        {"capability": 80}, {"capability": 100}, {"capability": 120}, {"dtype": torch.float32}, {"head_dim": 60},
        {"head_dim": 264}, {"v_head_dim": 0}, {"scale": -1.0}, {"scale": 0.0}, {"kind": "bwd", "v_head_dim": 128},
    ]  # fmt: skip
    assert [change for change in bad if hopper.takes(**{**good, **change})] == []


def test_aligned() -> None:
    x = torch.empty(2, 3, 40, 64, dtype=torch.bfloat16)
    assert hopper.aligned(x, x.transpose(1, 2), x[:, :, 1:], x[..., 8:40], x[:, :1].transpose(0, 1))
    assert not hopper.aligned(x.mT)
    assert not hopper.aligned(x[:1].expand(2, 3, 40, 64))
    assert not hopper.aligned(x[..., 4:60])  # starts at 8 bytes
    assert not hopper.aligned(torch.empty(2, 3, 40, 68, dtype=torch.bfloat16)[..., :64])
    single = torch.empty_strided((1, 1, 40, 64), (7, 5, 64, 1), dtype=torch.bfloat16)
    assert hopper.aligned(single)


def test_a_bound_that_hides_nothing_is_none() -> None:
    full = _call(64, 64, None, None, None, 1024, torch.bfloat16)
    for lower, upper in ((-1023, None), (None, 1023), (-5000, 5000)):
        assert _call(64, 64, lower, upper, None, 1024, torch.bfloat16).constants == full.constants
    assert _call(64, 64, -1022, 1022, None, 1024, torch.bfloat16).constants["HAS_LOWER"]


@pytest.mark.parametrize(("lower", "upper"), [(10, 9), (100, None), (None, -50), (100, 200), (-80, -50)])
def test_blind_problems_launch_nothing(lower: int | None, upper: int | None) -> None:
    query, key = torch.ones(1, 1, 50, 64), torch.ones(1, 1, 100, 64)
    out, lse = torch.full_like(query, torch.nan), torch.full((1, 1, 50), torch.nan)
    mask = hopper.MaskSpec(lower, upper)
    counter = torch.zeros(1, dtype=torch.int32)
    assert hopper.forward(query, key, key, out, lse, counter, scale=1.0, mask=mask, softcap=None) == []
    assert not out.any() and torch.isneginf(lse).all()


def test_config_override() -> None:
    c = hopper.Config(block_n=64, per_sm=2)
    query = torch.empty(1, 2, 1024, 64, dtype=torch.bfloat16)
    lse, counter = torch.empty(1, 2, 1024), torch.zeros(1, dtype=torch.int32)
    (call,) = hopper.forward(
        query, query, query, query, lse, counter, scale=1.0, mask=hopper.MaskSpec(upper=0), softcap=None, config=c,
        processors=4,
    )  # fmt: skip
    assert call.grid == (8,) and call.constants["BLOCK_N"] == 64 and call.constants["maxnreg"] == 80
