"""The second call of a kind and later ones, which are launched past Triton, against float64 on an H100 or its like."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from flash_inductor.ops import attn, attn_backward
from flash_inductor.ops.launch import Launch
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.testing import assert_close_to_reference, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]
_FIRST = 4  # launches of a first call: one of the forward, three of the backward


@pytest.fixture
def through_triton(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches that Triton made."""
    made: list[Launch] = []
    original = Launch.__call__

    def note(self: Launch) -> Any:
        made.append(self)
        return original(self)

    monkeypatch.setattr(Launch, "__call__", note)
    return made


def call_and_check(dim: int, q_len: int, seed: int) -> None:
    options: dict[str, Any] = {"is_causal": True, "kernel_name": "gluon"}
    sizes = {"heads": 4, "kv_heads": 2, "q_len": q_len, "head_dim": dim}
    inputs = make_inputs("bnhd", **sizes, dtype=torch.bfloat16, device="cuda", seed=seed)
    out, lse = attn(*inputs, **options)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    grads = attn_backward(grad_out, grad_lse, *inputs, out, lse, **options)[:3]
    spec = AttentionSpec(None, MaskSpec(upper=0))
    assert_close_to_reference([out, lse, *grads], *inputs, spec, grad_out=grad_out, grad_lse=grad_lse)


def here(call: Callable[[], None]) -> None:
    call()


def in_a_new_thread(call: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def on_a_stream(call: Callable[[], None]) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("where", [here, in_a_new_thread, on_a_stream])
def test_later_calls(where: Callable[[Callable[[], None]], None], dim: int, through_triton: list[Launch]) -> None:
    q_len = {here: 201, in_a_new_thread: 202, on_a_stream: 203}[where]  # a kind of its own for each test
    held = []
    for i in range(4):
        where(partial(call_and_check, dim, q_len, i))
        held.append(torch.empty(1 << (16 + i), device="cuda"))  # the next call's tensors lie elsewhere
        assert len(through_triton) == _FIRST


def test_threads_that_call_at_once(through_triton: list[Launch]) -> None:
    """Calls of one kind, whose parameters are rewritten for each launch."""
    call_and_check(64, 333, 0)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(call_and_check, 64, 333, i) for i in range(40)]:
            done.result()
    assert len(through_triton) == _FIRST
