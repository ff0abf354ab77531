"""Every entry of the tuning table on a CUDA device, against float64: a compiler may get one tile wrong and not another.

Triton 3.6 did: dK and dV of a 64 x 64 tile at head dim 256, with a window and an older spelling of tanh, ignored the
mask of the first key tile, the same way each time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_inductor.kernels.configs import Config, Kind, configs
from flash_inductor.ops import choice, cuda
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.testing import assert_close_to_reference, make_inputs

pytestmark = pytest.mark.gpu

_DIMS = (64, 128, 256)
# Both dtypes run the same code, so each has features of its own.
_FEATURES: dict[str, tuple[dict[str, Any], float | None, torch.dtype]] = {
    "causal": ({"is_causal": True}, None, torch.float16),
    "window_softcap": ({"is_causal": True, "window_left": 128}, 50.0, torch.bfloat16),
}


def _rows() -> list[tuple[Kind, int, Config]]:
    capability, limit = choice.device_limits(0) if torch.cuda.is_available() else (90, None)
    kinds: tuple[Kind, ...] = ("fwd", "dq", "dkdv")
    return [(kind, dim, c) for kind in kinds for dim in _DIMS for c in configs(kind, capability, dim, dim, 2, limit)]


@pytest.mark.parametrize("features", _FEATURES)
@pytest.mark.parametrize(("kind", "dim", "config"), _rows())
def test_entry(kind: Kind, dim: int, config: Config, features: str) -> None:
    mask, softcap, dtype = _FEATURES[features]
    inputs = make_inputs(batch=1, heads=2, kv_heads=1, q_len=500, head_dim=dim, dtype=dtype, device="cuda")
    spec = AttentionSpec(None, MaskSpec.from_window(**mask), softcap)
    out, lse = cuda.forward(*inputs, softcap=softcap, **mask, **({"config": config} if kind == "fwd" else {}))
    results: list[Any] = [out, lse]
    grad_out = torch.randn_like(out)
    if kind != "fwd":
        mine = {f"{kind}_config": config, "grad_mask": (kind == "dq", kind == "dkdv", kind == "dkdv", False, False)}
        grads = cuda.backward(grad_out, None, *inputs, out, lse, softcap=softcap, **mask, **mine)
        results += [x if x.numel() else None for x in grads[:3]]
    assert_close_to_reference(results, *inputs, spec, grad_out=grad_out)
