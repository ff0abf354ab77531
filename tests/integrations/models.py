"""Tiny random Transformers models, two of the same weights: eager attention and flash_inductor's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as t

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ENCODER = {
    name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}

DECODERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: t.LlamaConfig(**SIZES),
    "mistral": lambda: t.MistralConfig(**SIZES, sliding_window=5),
    "gemma2": lambda: t.Gemma2Config(
        **SIZES, head_dim=8, sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=16
    ),
    "gemma3": lambda: t.Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
    ),
    "qwen3": lambda: t.Qwen3Config(**SIZES, head_dim=8),
    "gpt_oss": lambda: t.GptOssConfig(
        **SIZES, head_dim=8, sliding_window=5, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "llama4": lambda: t.Llama4TextConfig(
        **SIZES, head_dim=8, attention_chunk_size=6, intermediate_size_mlp=48, num_local_experts=2,
        layer_types=["chunked_attention", "full_attention"], use_qk_norm=False,
    ),
}  # fmt: skip


def pair(config: Any, build: Callable[..., Any], dtype: torch.dtype = torch.float64, **kwargs: Any) -> tuple[Any, Any]:
    """The model with eager attention and with ours, of equal random weights."""
    models = []
    for implementation in ("eager", "flash_inductor"):
        torch.manual_seed(0)
        model = build(type(config).from_dict(config.to_dict()), attn_implementation=implementation, **kwargs)
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(parameter)
        models.append(model.to(dtype))
    assert models[1].config._attn_implementation == "flash_inductor"
    return models[0], models[1]


def decoders(name: str, dtype: torch.dtype = torch.float64, layers: int = 2, experts: str = "eager") -> tuple[Any, Any]:
    config = DECODERS[name]()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return pair(config, t.AutoModelForCausalLM.from_config, dtype, experts_implementation=experts)


def batch(kind: str, length: int = 14) -> dict[str, torch.Tensor]:
    """Two sequences of random tokens: "plain", padded "right" or "left", or each "packed" of documents."""
    ids = torch.randint(2, VOCABULARY, (2, length))
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if kind in ("right", "left"):
        real = torch.ones_like(ids)
        real[0, slice(length - 4, None) if kind == "right" else slice(0, 4)] = 0
        # The first real token is predicted by what is before it: on the left by padding, of which nothing is promised.
        inputs |= {"attention_mask": real, "labels": ids.masked_fill((real == 0) | (real.cumsum(1) < 2), -100)}
    elif kind == "packed":
        lengths = [[3, 7, length - 10], [8, length - 8]]
        inputs["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return inputs


def losses_and_gradients(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Logits of real tokens, loss, and the gradient of every parameter."""
    out = model(**inputs, use_cache=False)
    out.loss.backward()
    logits = out.logits.detach()
    if "attention_mask" in inputs:
        logits = logits[inputs["attention_mask"].bool()]
    found = {"logits": logits, "loss": out.loss.detach()}
    return found | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor], tolerance: float = 1e-9) -> None:
    """All tensors, errors relative to the largest number of each."""
    assert expected.keys() == got.keys()
    for name, x in expected.items():
        error = (x - got[name]).abs().max()
        assert error <= tolerance * max(1.0, x.abs().max()), f"{name}: {error}"
