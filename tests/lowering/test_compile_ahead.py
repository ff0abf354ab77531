"""Lowering begins to compile the very kernels that are launched later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakecuda import lower
from harness import qkv

from flash_inductor import config
from flash_inductor._compat import compile_workers
from flash_inductor.ops import ahead, attn
from flash_inductor.spec import MaskSpec

hopper = pytest.importorskip("flash_inductor.ops.hopper", reason="needs a Triton with Gluon", exc_type=ImportError)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({}, MaskSpec()),
        ({"is_causal": True}, MaskSpec(upper=0)),
        ({"is_causal": True, "window_left": 70}, MaskSpec(-70, 0)),
    ],
    ids=["full", "causal", "window"],
)
def test_begun_is_what_is_launched(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], mask: MaskSpec, dynamic: bool
) -> None:
    from flash_inductor.ops import hopper_backward

    begun: list[tuple[Any, ...]] = []
    monkeypatch.setattr(compile_workers, "running", lambda: True)
    monkeypatch.setattr(ahead, "begin", lambda *args: begun.append(args))
    monkeypatch.setattr(hopper, "processors_of", lambda device: 132)
    inputs = qkv(q_len=200, dim=64, dtype=torch.bfloat16)
    if dynamic:
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 2)
    with config.override(kernel="auto"):
        lower(lambda query, key, value: attn(query, key, value, **options)[0], inputs)

    query, key, value = (x.detach() for x in inputs)
    out, lse = torch.empty_like(query), torch.empty(query.shape[:3])
    numbers = {"scale": 64**-0.5, "mask": mask, "softcap": None}
    launches = [
        *hopper.forward(query, key, value, out, lse, torch.zeros(1, dtype=torch.int32), **numbers),
        *hopper_backward.backward(
            torch.empty_like(out), None, query, key, value, out, lse, *map(torch.empty_like, (query, key, value)),
            **numbers, deterministic=False,
        ),
    ]  # fmt: skip
    assert {(arch, device) for *_, arch, device in begun} == {(90, 0)}
    found = [ahead._key(kernel, constants, args, 0) for kernel, constants, args, *_ in begun]
    assert found == [ahead._key(x.kernel, x.constants, x.args, 0) for x in launches]
