"""The logic of the Hopper forward in the emulator: every loop, both tilings, ragged lengths, bands, groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_inductor.kernels import hopper as package
from flash_inductor.ops import hopper
from flash_inductor.ops.hopper import Config
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.testing import assert_close_to_reference, make_inputs

from .gluon_emulator import Descriptor, Pointer, launch, load

_FOLDER = Path(package.__path__[0])
_TWO = Config(stages=2)
_THREE = Config(warpgroups=3, block_n=64, stages=3, ping_pong=False)
_TURNS = Config(warpgroups=3, block_n=64, stages=2)
_REUSED = Config(block_n=64, out_in_query=True)
_CASES: dict[str, tuple[Config, dict[str, Any], MaskSpec, float | None]] = {
    # name: (config, sizes, band, softcap)
    "full": (_TWO, {"q_len": 300, "kv_len": 333}, MaskSpec(), None),
    "full_three": (_THREE, {"q_len": 300, "kv_len": 256}, MaskSpec(), None),
    "full_turns": (_TURNS, {"q_len": 300, "kv_len": 256}, MaskSpec(), None),
    "window_turns": (_TURNS, {"q_len": 450, "kv_len": 500}, MaskSpec(-70, 40), None),
    "causal": (_TWO, {"q_len": 300, "heads": 4, "kv_heads": 2}, MaskSpec(upper=0), None),
    "causal_three": (_THREE, {"q_len": 450, "heads": 4, "kv_heads": 2}, MaskSpec(upper=0), None),
    "bottom_right": (_THREE, {"q_len": 200, "kv_len": 500}, MaskSpec(upper=300), None),
    "fewer_keys": (_THREE, {"q_len": 400, "kv_len": 130}, MaskSpec(upper=-270), None),
    "left": (_THREE, {"q_len": 500, "kv_len": 400}, MaskSpec(lower=-100), None),
    "window": (_TWO, {"q_len": 450}, MaskSpec(-200, 0), None),
    "narrow": (_THREE, {"q_len": 450}, MaskSpec(-70, 0), None),
    "both_sides": (_THREE, {"q_len": 400}, MaskSpec(-30, 40), None),
    "thin": (_REUSED, {"q_len": 400, "kv_len": 200}, MaskSpec(-3, -2), None),
    "far_right": (_THREE, {"q_len": 100, "kv_len": 600}, MaskSpec(390, 450), None),
    "one_query": (_THREE, {"q_len": 1, "kv_len": 500}, MaskSpec(), None),
    "softcap": (_REUSED, {"q_len": 300}, MaskSpec(upper=0), 2.0),
    "softcap_high": (_THREE, {"q_len": 300, "kv_len": 200}, MaskSpec(-60, 0), 200.0),
    "two_parts": (_TWO, {"q_len": 200, "head_dim": 80, "v_head_dim": 96}, MaskSpec(upper=0), None),
    "wide_value": (_TWO, {"q_len": 200, "v_head_dim": 160}, MaskSpec(upper=0), None),
}


@pytest.mark.parametrize("name", _CASES)
def test_emulated(name: str) -> None:
    config, sizes, mask, softcap = _CASES[name]
    run(config, *make_inputs(**{"batch": 1, "heads": 2, "head_dim": 64, **sizes}, dtype=torch.bfloat16), mask, softcap)


@pytest.mark.parametrize("size", [1e3, 3e4, 1e10])
def test_huge_scores(size: float) -> None:
    """On both sides of where the factor changes; later blocks of keys have larger scores, the last ones are equal."""
    query, key, value = make_inputs(batch=1, heads=1, q_len=64, kv_len=333, head_dim=64, dtype=torch.bfloat16)
    query, key = torch.full_like(query, size), torch.full_like(key, size)
    key *= torch.tensor([-1.0, -0.5, 0.25, 1.0]).repeat_interleave(84)[:333, None].bfloat16()
    run(_TWO, query, key, value, MaskSpec(), None)


def run(config: Config, query: Tensor, key: Tensor, value: Tensor, mask: MaskSpec, softcap: float | None) -> None:
    out = torch.full((*query.shape[:3], value.shape[3]), torch.nan, dtype=query.dtype)
    lse = torch.full(query.shape[:3], torch.nan)
    counter = torch.zeros(1, dtype=torch.int32)
    scale = query.shape[3] ** -0.5
    # Three blocks of threads for more tiles than that: they go on from tile to tile, and the counter comes into play.
    processors = 3 // config.per_sm
    (call,) = hopper.forward(
        query, key, value, out, lse, counter, scale=scale, mask=mask, softcap=softcap, config=config,
        processors=processors,
    )  # fmt: skip
    names = load(_FOLDER / "tiles.py", _FOLDER / "forward.py")
    descriptors = [Descriptor(x.base, x.block_shape) for x in call.args[:4]]
    constants = {k: v for k, v in call.constants.items() if k not in ("num_warps", "maxnreg")}
    arguments = (*descriptors, Pointer(lse), Pointer(counter), *call.args[6:])
    launch(names["forward_kernel"], call.grid[0], *arguments, **constants)
    assert counter.item() == 0
    assert_close_to_reference([out, lse], query, key, value, AttentionSpec(scale, mask, softcap))
