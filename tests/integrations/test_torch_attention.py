"""As torch's FlashAttention.  Its ops have no kernels on the CPU, where the overrides can be tried for themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention

from flash_inductor.integrations.torch_attention import BACKWARD, FORWARD, Handle, register

flash = torch.ops.aten._scaled_dot_product_flash_attention


class Stock:
    """Stands for torch's own kernel."""

    def __init__(self) -> None:
        self.calls = 0

    def call_boxed(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        query = args[0]
        state = torch.zeros(2, dtype=torch.uint64)
        return query.clone(), query.new_zeros(query.shape[:3]), None, None, 1, 1, state, state[0], query.new_empty(0)


@pytest.fixture
def stock() -> Iterator[Stock]:
    stock = Stock()
    handle = Handle("CPU", {FORWARD: stock, BACKWARD: stock})
    yield stock
    handle.remove()
    q = torch.randn(1, 1, 2, 8)
    with pytest.raises(NotImplementedError):
        flash(q, q, q)


@pytest.mark.parametrize("is_causal", [False, True])
def test_forward_and_gradients(stock: Stock, is_causal: bool) -> None:
    inputs = [torch.randn(2, 3, 7, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    out, lse, *_ = flash(*inputs, 0.0, is_causal, scale=0.4)
    expected = F.scaled_dot_product_attention(*inputs, is_causal=is_causal, scale=0.4)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(out)
    for got, wanted in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    assert stock.calls == 0 and lse.shape == (2, 3, 7)


def test_what_is_not_supported_is_left_to_torch(stock: Stock) -> None:
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    flash(q, q, q, 0.1)
    flash(q, k, k, 0.0, True)
    flash(q.to(torch.int32), q.to(torch.int32), q.to(torch.int32))
    assert stock.calls == 3
    flash(q, k, k)
    assert stock.calls == 3


def test_registered_but_not_active() -> None:
    register()
    assert "flash_inductor" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() != "flash_inductor"


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_active_on_a_gpu(head_dim: int, is_causal: bool) -> None:
    shape = (2, 4, 300, head_dim)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    exact = [x.detach().double().cpu().requires_grad_() for x in inputs]
    grad = torch.randn(shape, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(*exact, is_causal=is_causal)
    wanted = [expected, *torch.autograd.grad(expected, exact, grad)]
    register()
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        errors = []
        for activate in (False, True):
            if activate:
                attention.activate_flash_attention_impl("flash_inductor")
            try:
                with torch.profiler.profile() as profile:
                    out = F.scaled_dot_product_attention(*inputs, is_causal=is_causal)
                    got = [out, *torch.autograd.grad(out, inputs, grad.cuda().bfloat16())]
            finally:
                if activate:
                    attention.restore_flash_attention_impl()
            ours = any(event.key.startswith("flashbwd::") for event in profile.key_averages())
            assert ours == activate
            errors.append([(x.cpu().double() - y).abs().max() for x, y in zip(got, wanted, strict=True)])
    for stock_error, error in zip(*errors, strict=True):
        assert error <= 2 * stock_error + 1e-3
