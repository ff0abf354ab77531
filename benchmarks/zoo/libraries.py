"""Models of other libraries: diffusers, timm, open_clip, litgpt, x-transformers, vit-pytorch."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from .registry import (
    BATCH,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    LENGTH,
    VOCABULARY,
    Inputs,
    entry,
    images,
    tokens,
)


def _declare_torchvision_ops() -> None:
    """Let a torchvision built for another torch be imported: its C++ ops, which nothing here calls, must exist."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except Exception:
        names = "nms qnms roi_align _roi_align_backward qroi_align ps_roi_align _ps_roi_align_backward roi_pool "
        names += "_roi_pool_backward ps_roi_pool _ps_roi_pool_backward deform_conv2d _deform_conv2d_backward"
        for name in names.split():
            try:
                torch.library.define("torchvision::" + name, "() -> Tensor")
            except RuntimeError:  # this one is there
                continue


_declare_torchvision_ops()


class FirstOutput(nn.Module):
    """A diffusers model that gives a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> torch.Tensor:
        result: torch.Tensor = self.model(**inputs, return_dict=False)[0]
        return result


def _with_eager_processors(model: nn.Module) -> None:
    """diffusers' processors from before SDPA: baddbmm, softmax, bmm."""
    from diffusers.models.attention_processor import AttnProcessor

    for module in model.modules():
        if hasattr(module, "set_processor"):
            module.set_processor(AttnProcessor())


TIMESTEPS = (3, 5)


@entry("sd_unet", "diffusion", ("sdpa", "eager"), "diffusers")
def sd_unet(implementation: str, **_: Any) -> tuple[nn.Module, Inputs]:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    if implementation == "eager":
        _with_eager_processors(model)
    return FirstOutput(model), {
        "sample": torch.randn(BATCH, 4, 16, 16),
        "timestep": torch.tensor(TIMESTEPS),
        "encoder_hidden_states": torch.randn(BATCH, 7, 32),
    }


@entry("dit", "diffusion", ("sdpa", "eager"), "diffusers")
def dit(implementation: str, **_: Any) -> tuple[nn.Module, Inputs]:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=4,
        num_layers=LAYERS,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
    )
    if implementation == "eager":
        _with_eager_processors(model)
    return FirstOutput(model), {
        "hidden_states": torch.randn(BATCH, 4, 8, 8),
        "timestep": torch.tensor(TIMESTEPS),
        "class_labels": torch.tensor([1, 2]),
    }


@entry("sd3", "diffusion", ("sdpa",), "diffusers")
def sd3(implementation: str, **_: Any) -> tuple[nn.Module, Inputs]:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=LAYERS,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=16,
    )
    return FirstOutput(model), {
        "hidden_states": torch.randn(BATCH, 4, 8, 8),
        "encoder_hidden_states": torch.randn(BATCH, 7, 32),
        "pooled_projections": torch.randn(BATCH, 32),
        "timestep": torch.tensor(TIMESTEPS),
    }


def timm_model(name: str, model: str, *, family: str = "timm", size: int = 32, **own: Any) -> None:
    """Register a timm model, with fused attention and without."""

    @entry(name, family, ("sdpa", "eager"), "timm")
    def make(implementation: str, **_: Any) -> tuple[nn.Module, Inputs]:
        import timm
        from timm.layers import set_fused_attn

        fused = implementation == "sdpa"
        set_fused_attn(fused, experimental=fused)
        try:
            made = timm.create_model(model, pretrained=False, num_classes=10, img_size=size, **own)
        finally:
            set_fused_attn(True)
        return made, {"x": images(size)}


timm_model("timm_vit", "vit_tiny_patch16_224", depth=2)
timm_model(
    "timm_swin",
    "swin_tiny_patch4_window7_224",
    size=64,
    depths=(2, 2),
    num_heads=(2, 4),
    embed_dim=16,
    window_size=4,
)


@entry("openclip_text", "other", ("default",), "open_clip")
def openclip_text(implementation: str, **_: Any) -> tuple[nn.Module, Inputs]:
    from open_clip.transformer import TextTransformer

    model = TextTransformer(context_length=LENGTH, vocab_size=VOCABULARY, width=HIDDEN, heads=HEADS, layers=LAYERS)
    return model, {"text": tokens()}


@entry("openclip_vision", "other", ("default",), "open_clip")
def openclip_vision(implementation: str, **_: Any) -> tuple[nn.Module, Inputs]:
    from open_clip.transformer import VisionTransformer

    model = VisionTransformer(image_size=32, patch_size=8, width=HIDDEN, layers=LAYERS, heads=HEADS, mlp_ratio=2.0)
    return model, {"x": images()}


@entry("litgpt", "other", ("sdpa",), "litgpt")
def litgpt(implementation: str, **_: Any) -> tuple[nn.Module, Inputs]:
    from litgpt.model import GPT, Config

    config = Config(
        n_layer=LAYERS,
        n_head=HEADS,
        n_embd=HIDDEN,
        n_query_groups=KV_HEADS,
        block_size=64,
        vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY,
        head_size=HEAD_DIM,
        rotary_percentage=1.0,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=INTERMEDIATE,
    )
    return GPT(config), {"idx": tokens()}


def x_transformers(name: str, **own: Any) -> None:
    @entry(name, "other", ("eager", "flash"), "x_transformers")
    def make(implementation: str, **_: Any) -> tuple[nn.Module, Inputs]:
        from x_transformers import Decoder, TransformerWrapper

        flash = implementation == "flash"
        layers = Decoder(dim=HIDDEN, depth=LAYERS, heads=HEADS, attn_dim_head=HEAD_DIM, attn_flash=flash, **own)
        return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=64, attn_layers=layers), {"x": tokens()}


x_transformers("xtransformers", rotary_pos_emb=True)
x_transformers("xtransformers_alibi", alibi_pos_bias=True, alibi_num_heads=2)


@entry("vitpytorch_simple_flash", "other", ("flash",), "vit_pytorch")
def vitpytorch_simple_flash(implementation: str, **_: Any) -> tuple[nn.Module, Inputs]:
    from vit_pytorch.simple_flash_attn_vit import SimpleViT

    model = SimpleViT(
        image_size=32,
        patch_size=8,
        num_classes=10,
        dim=HIDDEN,
        depth=LAYERS,
        heads=HEADS,
        mlp_dim=INTERMEDIATE,
        dim_head=HEAD_DIM,
        use_flash=True,
    )
    return model, {"img": images()}
