"""Hugging Face decoders with a causal language model's head."""

from __future__ import annotations

from typing import Any

from torch import nn

from .registry import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
    WINDOW,
    Inputs,
    entry,
    given,
    labels,
    text,
    transformers_config,
    transformers_model,
)

BOTH = ("sdpa", "eager")
EAGER = ("eager",)  # transformers offers no SDPA for these


def decoder(
    name: str, config: str, model: str, implementations: tuple[str, ...] = BOTH, *, family: str = "decoder", **own: Any
) -> None:
    """Register a decoder; ``own`` is its config's arguments beside and instead of the usual ones."""

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
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        made = transformers_model(model, transformers_config(config, **given(**{**usual, **own})), implementation)
        inputs = text(padding)
        if train:  # as transformers' Trainer calls it
            inputs.update(labels=labels(inputs), use_cache=False)
        return made, inputs


GQA: dict[str, Any] = {"num_key_value_heads": KV_HEADS}
GQA16: dict[str, Any] = {**GQA, "head_dim": HEAD_DIM}
# Configs of the GPT-2 generation name things their own way.
NO_USUAL: dict[str, Any] = dict.fromkeys(
    ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings"), ...
)
GPT: dict[str, Any] = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 128}
MLA: dict[str, Any] = {
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
SLIDING_FULL = ["sliding_attention", "full_attention"]

decoder("llama", "LlamaConfig", "LlamaForCausalLM", **GQA)
decoder("mistral", "MistralConfig", "MistralForCausalLM", **GQA16, sliding_window=WINDOW)
decoder(
    "mixtral",
    "MixtralConfig",
    "MixtralForCausalLM",
    **GQA,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=None,
)
decoder("gemma", "GemmaConfig", "GemmaForCausalLM", num_key_value_heads=1, head_dim=HEAD_DIM)
decoder("gemma2", "Gemma2Config", "Gemma2ForCausalLM", EAGER, **GQA16, sliding_window=WINDOW, query_pre_attn_scalar=16)
decoder(
    "gemma3",
    "Gemma3TextConfig",
    "Gemma3ForCausalLM",
    **GQA16,
    sliding_window=WINDOW,
    layer_types=SLIDING_FULL,
    query_pre_attn_scalar=16,
)
decoder("qwen2", "Qwen2Config", "Qwen2ForCausalLM", **GQA)
decoder(
    "qwen2_swa",
    "Qwen2Config",
    "Qwen2ForCausalLM",
    **GQA,
    use_sliding_window=True,
    sliding_window=WINDOW,
    max_window_layers=1,
)
decoder("qwen3", "Qwen3Config", "Qwen3ForCausalLM", **GQA16)
decoder(
    "qwen2_moe",
    "Qwen2MoeConfig",
    "Qwen2MoeForCausalLM",
    **GQA,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)
decoder("phi", "PhiConfig", "PhiForCausalLM", num_key_value_heads=HEADS)
decoder("gpt2", "GPT2Config", "GPT2LMHeadModel", n_positions=128)
decoder(
    "gpt_neo",
    "GPTNeoConfig",
    "GPTNeoForCausalLM",
    EAGER,
    num_heads=HEADS,
    num_attention_heads=...,
    num_layers=LAYERS,
    num_hidden_layers=...,
    attention_types=[[["global", "local"], 1]],
    window_size=WINDOW,
)
decoder("gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM")
decoder("gptj", "GPTJConfig", "GPTJForCausalLM", **{**NO_USUAL, **GPT}, rotary_dim=8)
decoder("opt", "OPTConfig", "OPTForCausalLM", ffn_dim=INTERMEDIATE, intermediate_size=..., word_embed_proj_dim=HIDDEN)
decoder(
    "bloom",
    "BloomConfig",
    "BloomForCausalLM",
    EAGER,
    n_layer=LAYERS,
    n_head=HEADS,
    num_hidden_layers=...,
    num_attention_heads=...,
    intermediate_size=...,
)
decoder(
    "mpt",
    "MptConfig",
    "MptForCausalLM",
    EAGER,
    **{**NO_USUAL, "d_model": HIDDEN, "n_heads": HEADS, "n_layers": LAYERS, "max_seq_len": 128},
)
FALCON: dict[str, Any] = {"alibi": False, "intermediate_size": ...}
decoder("falcon", "FalconConfig", "FalconForCausalLM", **FALCON, new_decoder_architecture=True, num_kv_heads=KV_HEADS)
decoder("falcon_mqa", "FalconConfig", "FalconForCausalLM", **FALCON, new_decoder_architecture=False, multi_query=True)
decoder("gpt_bigcode", "GPTBigCodeConfig", "GPTBigCodeForCausalLM", **{**NO_USUAL, **GPT})
decoder("cohere", "CohereConfig", "CohereForCausalLM", **GQA)
decoder("olmo2", "Olmo2Config", "Olmo2ForCausalLM", **GQA)
decoder("granite", "GraniteConfig", "GraniteForCausalLM", **GQA, attention_multiplier=0.0625)
decoder("deepseek_v2", "DeepseekV2Config", "DeepseekV2ForCausalLM", **MLA, n_group=1, topk_group=1)
decoder("deepseek_v3", "DeepseekV3Config", "DeepseekV3ForCausalLM", **MLA, n_group=2, topk_group=1)
decoder(
    "gpt_oss",
    "GptOssConfig",
    "GptOssForCausalLM",
    EAGER,
    **GQA16,
    sliding_window=WINDOW,
    num_local_experts=4,
    num_experts_per_tok=2,
    layer_types=SLIDING_FULL,
)
decoder(
    "llama4",
    "Llama4TextConfig",
    "Llama4ForCausalLM",
    **GQA16,
    attention_chunk_size=WINDOW,
    num_local_experts=2,
    num_experts_per_tok=1,
    intermediate_size_mlp=INTERMEDIATE,
    interleave_moe_layer_step=1,
    no_rope_layers=[1, 0],
)
