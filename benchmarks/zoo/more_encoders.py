"""Further encoders, encoder-decoders, vision and audio models: what was learnt must hold for these too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .decoders import BOTH, EAGER
from .encoders import BART, SPECIAL, SWIN, T5, encoder, seq2seq, vision
from .libraries import FirstOutput, timm_model
from .registry import (
    BATCH,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
    Inputs,
    entry,
    images,
    tokens,
    transformers_config,
    transformers_model,
)

FAMILY, VISION = "more-encoders", "more-vision"


def more(name: str, config: str, model: str, implementations: tuple[str, ...] = BOTH, **own: Any) -> None:
    encoder(name, config, model, implementations, family=FAMILY, **own)


more("electra", "ElectraConfig", "ElectraForMaskedLM", embedding_size=32)
more("camembert", "CamembertConfig", "CamembertForMaskedLM")
more("xlm_roberta", "XLMRobertaConfig", "XLMRobertaForMaskedLM")
more("xlm_roberta_xl", "XLMRobertaXLConfig", "XLMRobertaXLForMaskedLM")
more("esm", "EsmConfig", "EsmForMaskedLM", mask_token_id=3, position_embedding_type="rotary")
more("mpnet", "MPNetConfig", "MPNetForMaskedLM", EAGER)
more("deberta", "DebertaConfig", "DebertaForMaskedLM", EAGER, relative_attention=True, pos_att_type=["p2c", "c2p"])
more("convbert", "ConvBertConfig", "ConvBertForMaskedLM", EAGER, embedding_size=32)
more("roformer", "RoFormerConfig", "RoFormerForMaskedLM", EAGER, embedding_size=32)
more("megatron_bert", "MegatronBertConfig", "MegatronBertForMaskedLM", EAGER)
more("ernie", "ErnieConfig", "ErnieForMaskedLM")
more("data2vec_text", "Data2VecTextConfig", "Data2VecTextForMaskedLM")
more(
    "mobilebert",
    "MobileBertConfig",
    "MobileBertForMaskedLM",
    embedding_size=32,
    intra_bottleneck_size=32,
    true_hidden_size=32,
)
more("squeezebert", "SqueezeBertConfig", "SqueezeBertForMaskedLM", EAGER, embedding_size=HIDDEN)
more("rembert", "RemBertConfig", "RemBertForMaskedLM", EAGER, input_embedding_size=32, output_embedding_size=32)
more("ibert", "IBertConfig", "IBertForMaskedLM", EAGER)
more(
    "xlm",
    "XLMConfig",
    "XLMWithLMHeadModel",
    EAGER,
    emb_dim=HIDDEN,
    n_layers=LAYERS,
    n_heads=HEADS,
    hidden_size=...,
    num_hidden_layers=...,
    num_attention_heads=...,
    intermediate_size=...,
)
more("bigbird_full", "BigBirdConfig", "BigBirdForMaskedLM", EAGER, attention_type="original_full")
more(
    "nystromformer",
    "NystromformerConfig",
    "NystromformerForMaskedLM",
    EAGER,
    segment_means_seq_len=32,
    num_landmarks=32,
)
more("eurobert", "EuroBertConfig", "EuroBertForMaskedLM", num_key_value_heads=KV_HEADS)


def text_to_text(name: str, config: str, model: str, implementations: tuple[str, ...] = BOTH, **own: Any) -> None:
    seq2seq(name, config, model, implementations, family=FAMILY, **own)


MBART: dict[str, Any] = {
    **BART,
    **SPECIAL,
    "max_position_embeddings": 128,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
text_to_text("mbart", "MBartConfig", "MBartForConditionalGeneration", **MBART)
text_to_text("pegasus", "PegasusConfig", "PegasusForConditionalGeneration", **MBART)
text_to_text("marian", "MarianConfig", "MarianMTModel", **MBART)
text_to_text("blenderbot", "BlenderbotConfig", "BlenderbotForConditionalGeneration", **MBART)
text_to_text("m2m_100", "M2M100Config", "M2M100ForConditionalGeneration", **MBART)
text_to_text("plbart", "PLBartConfig", "PLBartForConditionalGeneration", **MBART)
text_to_text("mt5", "MT5Config", "MT5ForConditionalGeneration", **T5)
text_to_text("umt5", "UMT5Config", "UMT5ForConditionalGeneration", **T5)
text_to_text("longt5_local", "LongT5Config", "LongT5ForConditionalGeneration", EAGER, **T5, local_radius=4)


def sees(name: str, config: str, model: str, implementations: tuple[str, ...] = BOTH, **own: Any) -> None:
    vision(name, config, model, implementations, family=VISION, **own)


sees("deit", "DeiTConfig", "DeiTForImageClassification")
sees("beit", "BeitConfig", "BeitModel", use_relative_position_bias=True)
sees("beit_shared_bias", "BeitConfig", "BeitModel", use_shared_relative_position_bias=True)
sees("data2vec_vision", "Data2VecVisionConfig", "Data2VecVisionModel", use_relative_position_bias=True)
sees("vit_msn", "ViTMSNConfig", "ViTMSNModel")
sees("dinov2_registers", "Dinov2WithRegistersConfig", "Dinov2WithRegistersModel")
sees("dinov3_vit", "DINOv3ViTConfig", "DINOv3ViTModel")
sees("ijepa", "IJepaConfig", "IJepaModel")
sees("yolos", "YolosConfig", "YolosModel", image_size=[32, 32], num_detection_tokens=4)
sees("swinv2", "Swinv2Config", "Swinv2Model", EAGER, **SWIN, patch_size=2)
sees("siglip_vision", "SiglipVisionConfig", "SiglipVisionModel")
sees(
    "pvt",
    "PvtConfig",
    "PvtModel",
    EAGER,
    hidden_size=...,
    num_hidden_layers=...,
    intermediate_size=...,
    patch_size=...,
    num_attention_heads=[1, 2],
    num_encoder_blocks=2,
    depths=[1, 1],
    hidden_sizes=[16, 32],
    patch_sizes=[4, 2],
    strides=[4, 2],
    mlp_ratios=[2, 2],
    sequence_reduction_ratios=[2, 1],
)
HIERARCHICAL: dict[str, Any] = {
    "image_size": ...,
    "patch_size": ...,
    "hidden_size": ...,
    "num_hidden_layers": ...,
    "intermediate_size": ...,
    "num_attention_heads": [1, 2],
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "hidden_sizes": [16, 32],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "mlp_ratios": [2, 2],
    "sr_ratios": [2, 1],
}
sees("segformer", "SegformerConfig", "SegformerModel", EAGER, **HIERARCHICAL)
sees("glpn", "GLPNConfig", "GLPNModel", EAGER, **HIERARCHICAL)


def hears(name: str, config: str, model: str, implementations: tuple[str, ...] = BOTH, **own: Any) -> None:
    @entry(name, VISION, implementations, "transformers")
    def make(implementation: str, train: bool = True, padding: str | None = None) -> tuple[nn.Module, Inputs]:
        usual: dict[str, Any] = {
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "intermediate_size": INTERMEDIATE,
            "conv_dim": (16, 16),
            "conv_kernel": (10, 4),
            "conv_stride": (5, 4),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
            "mask_time_prob": 0.0,
            "layerdrop": 0.0,
        }
        made = transformers_model(model, transformers_config(config, **{**usual, **own}), implementation)
        return made, {"input_values": torch.randn(BATCH, 800)}


hears("wav2vec2", "Wav2Vec2Config", "Wav2Vec2Model")
hears("hubert", "HubertConfig", "HubertModel")
hears("wavlm", "WavLMConfig", "WavLMModel", EAGER)
hears("unispeech", "UniSpeechConfig", "UniSpeechModel")
hears("data2vec_audio", "Data2VecAudioConfig", "Data2VecAudioModel")


@entry("ast", VISION, BOTH, "transformers")
def spectrogram(implementation: str, **_: Any) -> tuple[nn.Module, Inputs]:
    config = transformers_config(
        "ASTConfig",
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INTERMEDIATE,
        patch_size=4,
        frequency_stride=4,
        time_stride=4,
        max_length=16,
        num_mel_bins=16,
    )
    return transformers_model("ASTModel", config, implementation), {"input_values": torch.randn(BATCH, 16, 16)}


@entry("videomae", VISION, BOTH, "transformers")
def videomae(implementation: str, **_: Any) -> tuple[nn.Module, Inputs]:
    config = transformers_config(
        "VideoMAEConfig",
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INTERMEDIATE,
        image_size=16,
        patch_size=8,
        num_frames=4,
    )
    return transformers_model("VideoMAEModel", config, implementation), {
        "pixel_values": torch.randn(BATCH, 4, 3, 16, 16)
    }


timm_model("timm_vit_relpos", "vit_relpos_small_patch16_224", family=VISION, depth=2, embed_dim=64, num_heads=4)
timm_model("timm_deit3", "deit3_small_patch16_224", family=VISION, depth=2)
timm_model("timm_beit", "beit_base_patch16_224", family=VISION, depth=2, embed_dim=64, num_heads=4)
timm_model("timm_eva02", "eva02_tiny_patch14_224", family=VISION, size=28, depth=2)
timm_model("timm_cait", "cait_xxs24_224", family=VISION, depth=2)
timm_model("timm_xcit", "xcit_nano_12_p16_224", family=VISION, depth=2)
timm_model("timm_mvitv2", "mvitv2_tiny", family=VISION, size=64, depths=(1, 1), embed_dim=16)
timm_model(
    "timm_swinv2",
    "swinv2_tiny_window8_256",
    family=VISION,
    size=64,
    depths=(2, 2),
    num_heads=(2, 4),
    embed_dim=16,
    window_size=4,
)


def x_encoder(name: str, **own: Any) -> None:
    @entry(name, VISION, ("eager", "flash"), "x_transformers")
    def make(implementation: str, **_: Any) -> tuple[nn.Module, Inputs]:
        from x_transformers import Decoder, TransformerWrapper

        flash = implementation == "flash"
        layers = Decoder(dim=HIDDEN, depth=LAYERS, heads=HEADS, attn_dim_head=HEAD_DIM, attn_flash=flash, **own)
        return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=64, attn_layers=layers), {"x": tokens()}


x_encoder("xtransformers_gqa", attn_kv_heads=KV_HEADS)
x_encoder("xtransformers_qk_norm", attn_qk_norm=True)


@entry("vitpytorch_vit", VISION, ("eager",), "vit_pytorch")
def vitpytorch(implementation: str, **_: Any) -> tuple[nn.Module, Inputs]:
    from vit_pytorch import ViT

    model = ViT(
        image_size=32,
        patch_size=8,
        num_classes=10,
        dim=HIDDEN,
        depth=LAYERS,
        heads=HEADS,
        mlp_dim=INTERMEDIATE,
        dim_head=HEAD_DIM,
        dropout=0.1,
    )
    return model, {"img": images()}


@entry("flux", VISION, ("sdpa",), "diffusers")
def flux(implementation: str, **_: Any) -> tuple[nn.Module, Inputs]:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return FirstOutput(model), {
        "hidden_states": torch.randn(BATCH, 16, 4),
        "encoder_hidden_states": torch.randn(BATCH, 7, 32),
        "pooled_projections": torch.randn(BATCH, 32),
        "timestep": torch.tensor([0.3, 0.5]),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(7, 3),
    }
