"""Hugging Face encoders, encoder-decoders, audio and vision."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .decoders import BOTH, EAGER
from .registry import (
    BATCH,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    VOCABULARY,
    WINDOW,
    Inputs,
    entry,
    given,
    images,
    labels,
    text,
    tokens,
    transformers_config,
    transformers_model,
)

SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TARGET_LENGTH = 24  # below LENGTH: cross-attention isn't square


def encoder(
    name: str, config: str, model: str, implementations: tuple[str, ...] = BOTH, *, family: str = "encoder", **own: Any
) -> None:
    """Register a masked language model; ``own`` is its config's arguments beside and instead of the usual ones."""

    @entry(name, family, implementations, "transformers", paddable=True)
    def make(implementation: str, train: bool = True, padding: str | None = None) -> tuple[nn.Module, Inputs]:
        usual: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "intermediate_size": INTERMEDIATE,
            "max_position_embeddings": 128,
            "pad_token_id": 0,
        }
        made = transformers_model(model, transformers_config(config, **given(**{**usual, **own})), implementation)
        inputs = text(padding)
        if train:
            inputs["labels"] = labels(inputs)
        return made, inputs


encoder("bert", "BertConfig", "BertForMaskedLM")
encoder("roberta", "RobertaConfig", "RobertaForMaskedLM")
encoder(
    "distilbert",
    "DistilBertConfig",
    "DistilBertForMaskedLM",
    dim=HIDDEN,
    n_layers=LAYERS,
    n_heads=HEADS,
    hidden_dim=INTERMEDIATE,
    hidden_size=...,
    num_hidden_layers=...,
    num_attention_heads=...,
    intermediate_size=...,
)
encoder("albert", "AlbertConfig", "AlbertForMaskedLM", embedding_size=32)
encoder(
    "deberta_v2",
    "DebertaV2Config",
    "DebertaV2ForMaskedLM",
    EAGER,
    relative_attention=True,
    pos_att_type=["p2c", "c2p"],
    position_buckets=16,
    max_relative_positions=32,
)
encoder(
    "modernbert",
    "ModernBertConfig",
    "ModernBertForMaskedLM",
    global_attn_every_n_layers=2,
    local_attention=WINDOW,
    cls_token_id=1,
    sep_token_id=2,
    bos_token_id=1,
    eos_token_id=2,
)


def with_target(inputs: Inputs, train: bool) -> Inputs:
    """Add the decoder's side: labels in training, else the tokens themselves."""
    target = tokens(TARGET_LENGTH)
    return {**inputs, **({"labels": target, "use_cache": False} if train else {"decoder_input_ids": target})}


def seq2seq(
    name: str, config: str, model: str, implementations: tuple[str, ...] = BOTH, *, family: str = "encdec", **own: Any
) -> None:
    """Register a text to text model."""

    @entry(name, family, implementations, "transformers", paddable=True)
    def make(implementation: str, train: bool = True, padding: str | None = None) -> tuple[nn.Module, Inputs]:
        made = transformers_model(model, transformers_config(config, vocab_size=VOCABULARY, **own), implementation)
        return made, with_target(text(padding), train)


T5: dict[str, Any] = {
    "d_model": HIDDEN,
    "d_kv": HEAD_DIM,
    "d_ff": INTERMEDIATE,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
BART: dict[str, Any] = {
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": INTERMEDIATE,
    "decoder_ffn_dim": INTERMEDIATE,
}
seq2seq("t5", "T5Config", "T5ForConditionalGeneration", **T5)
seq2seq(
    "bart",
    "BartConfig",
    "BartForConditionalGeneration",
    **BART,
    **SPECIAL,
    max_position_embeddings=128,
    decoder_start_token_id=2,
    forced_eos_token_id=2,
)


@entry("whisper", "encdec", BOTH, "transformers")
def whisper(implementation: str, train: bool = True, padding: str | None = None) -> tuple[nn.Module, Inputs]:
    config = transformers_config(
        "WhisperConfig",
        vocab_size=VOCABULARY,
        **BART,
        **SPECIAL,
        num_mel_bins=8,
        max_source_positions=40,
        max_target_positions=64,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers_model("WhisperForConditionalGeneration", config, implementation)
    return model, with_target({"input_features": torch.randn(BATCH, 8, 80)}, train)


def vision(
    name: str,
    config: str,
    model: str,
    implementations: tuple[str, ...] = BOTH,
    *,
    family: str = "vision",
    size: int = 32,
    **own: Any,
) -> None:
    """Register a model that takes ``pixel_values``."""

    @entry(name, family, implementations, "transformers")
    def make(implementation: str, train: bool = True, padding: str | None = None) -> tuple[nn.Module, Inputs]:
        usual: dict[str, Any] = {
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "intermediate_size": INTERMEDIATE,
            "image_size": size,
            "patch_size": 8,
        }
        made = transformers_model(model, transformers_config(config, **given(**{**usual, **own})), implementation)
        return made, {"pixel_values": images(size)}


NO_USUAL: dict[str, Any] = dict.fromkeys(
    ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"), ...
)
SWIN: dict[str, Any] = {**NO_USUAL, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
vision("vit", "ViTConfig", "ViTForImageClassification")
vision("dinov2", "Dinov2Config", "Dinov2Model")
vision("swin", "SwinConfig", "SwinModel", **SWIN, patch_size=2)


def two_towers(name: str, config: str, model: str, **of_text: Any) -> None:
    """Register a model of text and images with a contrastive loss."""

    @entry(name, "vision", BOTH, "transformers", paddable=True)
    def make(implementation: str, train: bool = True, padding: str | None = None) -> tuple[nn.Module, Inputs]:
        usual: dict[str, Any] = {
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
        }
        projection = {"projection_dim": 32} if config == "CLIPConfig" else {}
        text_config = {**usual, **SPECIAL, "vocab_size": VOCABULARY, "max_position_embeddings": 64, **projection}
        vision_config = {**usual, "image_size": 32, "patch_size": 8, **projection}
        made = transformers_config(config, text_config={**text_config, **of_text}, vision_config=vision_config)
        inputs = {**text(padding), "pixel_values": images(), **({"return_loss": True} if train else {})}
        return transformers_model(model, made, implementation), inputs


two_towers("clip", "CLIPConfig", "CLIPModel")
two_towers("siglip", "SiglipConfig", "SiglipModel")


@entry("sam", "vision", BOTH, "transformers")
def sam(implementation: str, train: bool = True, padding: str | None = None) -> tuple[nn.Module, Inputs]:
    config = transformers_config(
        "SamConfig",
        vision_config={
            "hidden_size": 32,
            "output_channels": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 8,
            "window_size": 4,
            "global_attn_indexes": [1],
            "mlp_dim": 64,
            "num_pos_feats": 16,
        },
        prompt_encoder_config={"hidden_size": 32, "image_size": 64, "patch_size": 8, "mask_input_channels": 4},
        mask_decoder_config={"hidden_size": 32, "num_attention_heads": 2, "mlp_dim": 64, "iou_head_hidden_dim": 32},
    )
    points = torch.rand(BATCH, 1, 2, 2) * 64
    inputs = {"pixel_values": images(64), "input_points": points, "multimask_output": False}
    return transformers_model("SamModel", config, implementation), inputs
