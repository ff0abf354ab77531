"""Further decoders of Hugging Face: what was learnt on the first ones must hold for these too."""

from __future__ import annotations

from .decoders import BOTH, EAGER, FALCON, GPT, GQA, GQA16, NO_USUAL, SLIDING_FULL, decoder
from .registry import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, WINDOW

FAMILY = "more-decoders"


def more(name: str, config: str, model: str, implementations: tuple[str, ...] = BOTH, **own: object) -> None:
    decoder(name, config, model, implementations, family=FAMILY, **own)


MOE = {"num_experts": 4, "num_experts_per_tok": 2}

more("phi3", "Phi3Config", "Phi3ForCausalLM", **GQA, sliding_window=WINDOW)
more("stablelm", "StableLmConfig", "StableLmForCausalLM", **GQA)
more("starcoder2", "Starcoder2Config", "Starcoder2ForCausalLM", **GQA, sliding_window=WINDOW)
more("persimmon", "PersimmonConfig", "PersimmonForCausalLM")
more("codegen", "CodeGenConfig", "CodeGenForCausalLM", EAGER, **{**NO_USUAL, **GPT}, rotary_dim=8)
more("nemotron", "NemotronConfig", "NemotronForCausalLM", **GQA)
more("cohere2", "Cohere2Config", "Cohere2ForCausalLM", **GQA, sliding_window=WINDOW, layer_types=SLIDING_FULL)
more("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", **GQA16, **MOE, moe_intermediate_size=32)
more("olmo", "OlmoConfig", "OlmoForCausalLM", **GQA)
more("olmoe", "OlmoeConfig", "OlmoeForCausalLM", **GQA, **MOE)
more("olmo3", "Olmo3Config", "Olmo3ForCausalLM", **GQA, sliding_window=WINDOW, layer_types=SLIDING_FULL)
more("glm", "GlmConfig", "GlmForCausalLM", **GQA16)
more("glm4", "Glm4Config", "Glm4ForCausalLM", **GQA16)
more("exaone4", "Exaone4Config", "Exaone4ForCausalLM", **GQA, sliding_window=WINDOW, layer_types=SLIDING_FULL)
more("helium", "HeliumConfig", "HeliumForCausalLM", **GQA16)
more("smollm3", "SmolLM3Config", "SmolLM3ForCausalLM", **GQA)
more("granitemoe", "GraniteMoeConfig", "GraniteMoeForCausalLM", **GQA, num_local_experts=4, num_experts_per_tok=2)
more("falcon_alibi", "FalconConfig", "FalconForCausalLM", **{**FALCON, "alibi": True}, new_decoder_architecture=False)
more("gpt_neox_japanese", "GPTNeoXJapaneseConfig", "GPTNeoXJapaneseForCausalLM", EAGER)
more("openai_gpt", "OpenAIGPTConfig", "OpenAIGPTLMHeadModel", EAGER, **{**NO_USUAL, **GPT})
more("biogpt", "BioGptConfig", "BioGptForCausalLM")
more(
    "xglm",
    "XGLMConfig",
    "XGLMForCausalLM",
    EAGER,
    d_model=HIDDEN,
    num_layers=LAYERS,
    attention_heads=HEADS,
    ffn_dim=128,
)
more("bitnet", "BitNetConfig", "BitNetForCausalLM", **GQA)
more("diffllama", "DiffLlamaConfig", "DiffLlamaForCausalLM", **GQA)
more("arcee", "ArceeConfig", "ArceeForCausalLM", **GQA)
more("ernie4_5", "Ernie4_5Config", "Ernie4_5ForCausalLM", **GQA16)
more("seed_oss", "SeedOssConfig", "SeedOssForCausalLM", **GQA16)
more("apertus", "ApertusConfig", "ApertusForCausalLM", **GQA)
more(
    "recurrent_gemma",
    "RecurrentGemmaConfig",
    "RecurrentGemmaForCausalLM",
    num_key_value_heads=1,
    lru_width=HIDDEN,
    attention_window_size=WINDOW,
    block_types=["recurrent", "attention"],
)
more(
    "jamba",
    "JambaConfig",
    "JambaForCausalLM",
    **GQA,
    num_experts=2,
    attn_layer_period=2,
    attn_layer_offset=1,
    use_mamba_kernels=False,
)
more(
    "dbrx",
    "DbrxConfig",
    "DbrxForCausalLM",
    **{**NO_USUAL, "d_model": HIDDEN, "n_heads": HEADS, "n_layers": LAYERS},
    max_seq_len=128,
    attn_config={"kv_n_heads": KV_HEADS, "clip_qkv": 8.0},
    ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 2, "moe_top_k": 1},
)
more(
    "minimax",
    "MiniMaxConfig",
    "MiniMaxForCausalLM",
    **GQA16,
    num_local_experts=2,
    num_experts_per_tok=1,
    layer_types=["full_attention"] * LAYERS,
)
more("phimoe", "PhimoeConfig", "PhimoeForCausalLM", **GQA, num_local_experts=4, num_experts_per_tok=2)
more(
    "glm4_moe",
    "Glm4MoeConfig",
    "Glm4MoeForCausalLM",
    **GQA16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
)
more("hunyuan", "HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", **GQA16)
more(
    "vaultgemma",
    "VaultGemmaConfig",
    "VaultGemmaForCausalLM",
    EAGER,
    **GQA16,
    sliding_window=WINDOW,
    query_pre_attn_scalar=16,
)
more("ctrl", "CTRLConfig", "CTRLLMHeadModel", EAGER, **{**NO_USUAL, **GPT}, dff=128)
more(
    "gemma3n_like_mqa",
    "GemmaConfig",
    "GemmaForCausalLM",
    num_key_value_heads=1,
    head_dim=HEAD_DIM,
    use_bidirectional_attention=True,
)
