"""F.multi_head_attention_forward, which nn.MultiheadAttention and nn.Transformer* leave as one node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from site_helpers import Rewriter
from torch.nn.modules.activation import MultiheadAttention

L, S, N, E, H = 8, 11, 2, 32, 4


def inputs(*sizes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator).requires_grad_() for size in sizes]


def check(
    module: nn.Module, args: list[Any], *, dynamic: bool | None = None, rounds_to: torch.dtype = torch.float32
) -> Rewriter:
    """Outputs and the gradients of all inputs and parameters, compiled against eager.

    ``rounds_to``: the dtype that intermediate results are rounded to, in another place by each of the two.
    """
    torch._dynamo.reset()
    backend = Rewriter()

    def run(fn: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        out = fn(*args)
        needy = [x for x in (*args, *module.parameters()) if isinstance(x, torch.Tensor) and x.requires_grad]
        grads = torch.autograd.grad(out, needy, torch.randn(out.shape, dtype=out.dtype), allow_unused=True)
        return [out, *(g for g in grads if g is not None)]

    expected = run(module)
    actual = run(torch.compile(module, backend=backend, dynamic=dynamic))
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype is e.dtype
        torch.testing.assert_close(
            a,
            e,
            atol=(4 if rounds_to is torch.bfloat16 else 32)
            * torch.finfo(rounds_to).eps
            * float(e.detach().abs().max()),
            rtol=0,
        )
    return backend


def replaced(backend: Rewriter) -> list[bool]:
    assert all(s.form == "multi_head_attention_forward" for s in backend.sites)
    return [s.replaced for s in backend.sites]


class Attention(nn.Module):
    def __init__(self, need_weights: bool = False, **kwargs: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.attn = MultiheadAttention(E, H, **kwargs)
        for p in self.attn.parameters():  # the biases start at zero
            nn.init.normal_(p, std=0.2)
        self.need_weights = need_weights

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.attn(query, key, value, need_weights=self.need_weights, **kwargs)[0]


class SelfAttention(Attention):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        return self.attn(x, x, x, need_weights=self.need_weights, **kwargs)[0]


def causal(n: int = L) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(n)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_self_attention_is_replaced(need_weights: bool, batch_first: bool) -> None:
    backend = check(SelfAttention(need_weights, batch_first=batch_first), inputs((L, N, E)))
    assert replaced(backend) == [True]
    assert "multi_head_attention_forward" not in backend.ops()
    assert backend.ops().count("linear") == 2, "one product for query, key and value, one after"


def test_cross_attention_projects_key_and_value_at_once() -> None:
    class Cross(Attention):
        def forward(self, query: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.attn(query, memory, memory, need_weights=False)[0]

    backend = check(Cross(), inputs((L, N, E), (S, N, E)))
    assert replaced(backend) == [True]
    assert backend.ops().count("linear") == 3


def test_three_inputs() -> None:
    assert replaced(check(Attention(), inputs((L, N, E), (S, N, E), (S, N, E)))) == [True]


@pytest.mark.parametrize("bias", [False, True])
def test_separate_projections_of_other_widths(bias: bool) -> None:
    module = Attention(kdim=24, vdim=40, bias=bias)
    assert replaced(check(module, inputs((L, N, E), (S, N, 24), (S, N, 40)))) == [True]


def test_no_batch() -> None:
    assert replaced(check(SelfAttention(), inputs((L, E)))) == [True]


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("hint", [False, True])
def test_a_causal_mask_is_proved(need_weights: bool, hint: bool) -> None:
    class Causal(SelfAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.attn(x, x, x, need_weights=self.need_weights, attn_mask=causal(x.shape[0]), is_causal=hint)[0]

    backend = check(Causal(need_weights), inputs((L, N, E)))
    assert replaced(backend) == [True]
    spec = backend.sites[0].spec
    assert spec is not None
    assert (spec.mask.lower, spec.mask.upper) == (None, 0)


def test_a_bool_mask_hides_where_it_is_true() -> None:
    class Window(SelfAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            i = torch.arange(x.shape[0])
            distance = i[None, :] - i[:, None]
            hidden = (distance > 0) | (distance < -2)
            return F.multi_head_attention_forward(
                x,
                x,
                x,
                E,
                H,
                self.attn.in_proj_weight,
                self.attn.in_proj_bias,
                None,
                None,
                False,
                0.0,
                self.attn.out_proj.weight,
                self.attn.out_proj.bias,
                need_weights=False,
                attn_mask=hidden,
            )[0]

    backend = check(Window(), inputs((L, N, E)))
    assert replaced(backend) == [True]
    spec = backend.sites[0].spec
    assert spec is not None
    assert (spec.mask.lower, spec.mask.upper) == (-2, 0)


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layer_in_training(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
    assert replaced(check(layer, inputs((N, L, E)))) == [True]


def test_transformer_with_causal_decoder() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Transformer(E, H, 1, 1, 64, dropout=0.0, batch_first=True)

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self.inner(source, target, tgt_mask=causal(target.shape[1]), tgt_is_causal=True)

    backend = check(Model(), inputs((N, S, E), (N, L, E)))
    assert replaced(backend) == [True, True, True]


def test_dynamic_sizes() -> None:
    assert replaced(check(SelfAttention(batch_first=True), inputs((N, L, E)), dynamic=True)) == [True]


def test_autocast_gives_the_projections_dtype() -> None:
    class Model(SelfAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    backend = check(Model(), inputs((L, N, E)), rounds_to=torch.bfloat16)
    assert replaced(backend) == [True]
    assert backend.sites[0].shapes["query"].startswith("bf16")


def test_output_strides_are_kept() -> None:
    module, (x,) = SelfAttention(), inputs((L, N, E))
    torch._dynamo.reset()
    assert torch.compile(module, backend=Rewriter())(x).stride() == module(x).stride()


# --- left alone


def test_used_weights_are_left_alone() -> None:
    class Weights(SelfAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            out, weights = self.attn(x, x, x)
            return out + weights.sum()

    backend = check(Weights(), inputs((L, N, E)))
    assert replaced(backend) == [False]
    assert "need_weights" in str(backend.sites[0].reason)
    assert "multi_head_attention_forward" in backend.ops()


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_more_keys_than_given_are_left_alone(option: str) -> None:
    backend = check(SelfAttention(**{option: True}), inputs((L, N, E)))
    assert replaced(backend) == [False]


def test_a_refused_call_leaves_the_graph_as_it_was() -> None:
    module = SelfAttention(dropout=0.5)
    x = torch.randn(L, N, E, dtype=torch.float64)
    module.double()

    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return module(x)

    backend = Rewriter()
    torch._dynamo.reset()
    torch.compile(Wide(), backend=backend)(x)
    assert replaced(backend) == [False]
    assert "linear" not in backend.ops()
    assert "multi_head_attention_forward" in backend.ops()


def test_a_function_of_that_name_is_not_opened() -> None:
    def multi_head_attention_forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return multi_head_attention_forward(x)

    assert check(Model(), inputs((L, N, E))).sites == []
