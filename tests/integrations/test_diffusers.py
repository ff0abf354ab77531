"""The backend "flash_inductor" of diffusers against its native one, and a UNet compiled with the plugin on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models import attention_dispatch

import flash_inductor
from flash_inductor.integrations.diffusers import attention_backend, register
from flash_inductor.report import collect


@pytest.fixture(autouse=True)
def backends() -> Iterator[None]:
    register()
    yield
    attention_dispatch._AttentionBackendRegistry.set_active_backend(attention_dispatch.AttentionBackendName.NATIVE)


def flux() -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 6, 4),
        "encoder_hidden_states": torch.randn(2, 5, 8),
        "pooled_projections": torch.randn(2, 8),
        "timestep": torch.rand(2),
        "img_ids": torch.zeros(6, 3),
        "txt_ids": torch.zeros(5, 3),
    }
    return model.double(), {key: x.double() for key, x in inputs.items()}


def test_a_transformer_and_its_gradients() -> None:
    model, inputs = flux()
    found = []
    for backend in ("native", "flash_inductor"):
        model.zero_grad()
        model.set_attention_backend(backend)
        out = model(**inputs).sample
        out.square().sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None} | {"out": out})
    for name, x in found[0].items():
        torch.testing.assert_close(found[1][name], x, rtol=1e-8, atol=1e-10, msg=name)


def test_compiled_in_one_graph() -> None:
    model, inputs = flux()
    graphs: list[torch.fx.GraphModule] = []

    def keep(module: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(module)
        return module

    model.set_attention_backend("flash_inductor")
    with torch.no_grad():
        out = torch.compile(model, backend=keep, fullgraph=True)(**inputs).sample
        model.set_attention_backend("native")
        torch.testing.assert_close(out, model(**inputs).sample, rtol=1e-8, atol=1e-10)
    (graph,) = graphs
    assert len([n for n in graph.graph.nodes if "flashbwd" in str(n.target)]) == 2


@pytest.mark.parametrize(
    "mask",
    [None, torch.rand(2, 7) > 0.4, torch.rand(2, 1, 6, 7) > 0.4, torch.randn(2, 7), torch.randn(6, 7)],
    ids=["none", "keys", "bool", "key bias", "bias"],
)
def test_masks(mask: torch.Tensor | None) -> None:
    if mask is not None and mask.dtype is torch.bool:
        mask[..., 0] = True
    q, k, v = (torch.randn(2, n, 2, 8) for n in (6, 7, 7))
    outs = []
    for backend in ("native", "flash_inductor"):
        with attention_dispatch.attention_backend(backend):
            outs.append(attention_dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask, scale=0.3))
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


def test_lse_causal_and_context_parallelism() -> None:
    q, k, v = (torch.randn(2, 6, 2, 8) for _ in range(3))
    out, lse = attention_backend(q, k, v, is_causal=True, return_lse=True)
    assert out.shape == (2, 6, 2, 8) and lse.shape == (2, 6, 2)
    scores = (q.transpose(1, 2) @ k.transpose(1, 2).mT / 8**0.5).masked_fill(~torch.ones(6, 6).tril().bool(), -1e9)
    torch.testing.assert_close(lse.transpose(1, 2), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="context parallelism"):
        attention_backend(q, k, v, _parallel_config=object())


def test_registering_again_changes_nothing() -> None:
    before = list(attention_dispatch.AttentionBackendName)
    register()
    assert list(attention_dispatch.AttentionBackendName) == before
    assert [name.value for name in before].count("flash_inductor") == 1


@pytest.mark.usefixtures("no_kernels")
def test_a_unet_with_the_plugin_on() -> None:
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=4, block_out_channels=(8,), layers_per_block=1, norm_num_groups=4, cross_attention_dim=8,
        attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D",), mid_block_type=None,
        up_block_types=("CrossAttnUpBlock2D",),
    )  # fmt: skip
    inputs = (torch.randn(2, 4, 4, 4), torch.tensor([3, 5]), torch.randn(2, 6, 8))
    with torch.no_grad(), flash_inductor.enabled(), collect() as sites:
        out = torch.compile(model)(*inputs).sample
        torch.testing.assert_close(out, model(*inputs).sample, rtol=1e-4, atol=1e-5)
    assert len(sites) == 6 and all(site.replaced for site in sites)
