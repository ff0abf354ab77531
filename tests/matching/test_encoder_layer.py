"""nn.TransformerEncoderLayer in evaluation without gradients: one node for the whole layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from site_helpers import Rewriter

N, E, H = 10, 32, 4


def layer_of(**options: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 64, dropout=0.3, batch_first=True, **options).eval()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.3)
    return layer


def run(layer: nn.Module, *args: Any, dynamic: bool | None = None, **kwargs: Any) -> Rewriter:
    torch._dynamo.reset()
    backend = Rewriter()
    x = torch.randn(2, N, E, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        actual = torch.compile(layer, backend=backend, dynamic=dynamic)(x, *args, **kwargs)
        expected = layer(x, *args, **kwargs)
    visible = kwargs["src_key_padding_mask"].logical_not() if "src_key_padding_mask" in kwargs else slice(None)
    torch.testing.assert_close(actual[visible], expected[visible], atol=2e-5, rtol=1e-5)
    assert [s.form for s in backend.sites] == ["transformer_encoder_layer"]
    return backend


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_is_opened(norm_first: bool, activation: str) -> None:
    backend = run(layer_of(norm_first=norm_first, activation=activation))
    assert backend.sites[0].replaced, backend.sites[0].reason
    assert "_transformer_encoder_layer_fwd" not in backend.ops()


def test_dynamic_sizes() -> None:
    with torch.no_grad():
        try:
            torch.compile(layer_of(), backend="eager", dynamic=True, fullgraph=True)(torch.randn(2, N, E))
        except torch._dynamo.exc.Unsupported as error:  # as in torch 2.11: no graph holds the call, with or without us
            pytest.skip(f"Dynamo can't trace the layer with symbolic sizes: {str(error).splitlines()[0]}")
    assert run(layer_of(), dynamic=True).sites[0].replaced


def test_causal_mask() -> None:
    backend = run(layer_of(), src_mask=nn.Transformer.generate_square_subsequent_mask(N), is_causal=True)
    assert backend.sites[0].replaced


def test_causal_mask_made_in_the_graph() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer_of()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x, src_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]), is_causal=True)

    backend = run(Model().eval())
    spec = backend.sites[0].spec
    assert backend.sites[0].replaced and spec is not None
    assert (spec.mask.lower, spec.mask.upper, spec.extras) == (None, 0, ())


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_padding(kind: torch.dtype) -> None:
    padding = torch.zeros(2, N, dtype=torch.bool)
    padding[0, -3:] = True
    if kind is torch.float32:

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = layer_of()

            def forward(self, x: torch.Tensor, src_key_padding_mask: torch.Tensor) -> torch.Tensor:
                hidden = torch.zeros(2, N).masked_fill(src_key_padding_mask, float("-inf"))
                return self.layer(x, src_key_padding_mask=hidden)

        backend = run(Model().eval(), src_key_padding_mask=padding)
    else:
        backend = run(layer_of(), src_key_padding_mask=padding)
    assert backend.sites[0].replaced, backend.sites[0].reason
    assert backend.sites[0].spec is not None and backend.sites[0].spec.extras == ("padding",)


def test_a_refused_layer_stays_as_it_was() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer_of()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return self.layer(x)

    backend = run(Model().eval())
    assert not backend.sites[0].replaced
    assert "_transformer_encoder_layer_fwd" in backend.ops() and "linear" not in backend.ops()
