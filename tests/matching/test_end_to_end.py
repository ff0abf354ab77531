"""Real models of transformers: every attention site is replaced, outputs and all gradients stay what eager gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from site_helpers import Rewriter

transformers = pytest.importorskip("transformers")

COMMON: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
LLAMA = {**COMMON, "num_key_value_heads": 2, "head_dim": 8}
GPT = {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
NEO = {
    **{k: v for k, v in COMMON.items() if k not in ("num_hidden_layers", "num_attention_heads")},
    "num_layers": 2,
    "num_heads": 4,
    "window_size": 4,
    "attention_types": [[["global", "local"], 1]],
}
OPT = {**COMMON, "ffn_dim": 32, "word_embed_proj_dim": 32, "dropout": 0.0}
VIT = {**COMMON, "image_size": 16, "patch_size": 4}

# name: config class, its arguments, model class, window of each layer (None: whole rows), softcap
MODELS: dict[str, tuple[str, dict[str, Any], str, list[int | None], float | None]] = {
    "llama": ("LlamaConfig", LLAMA, "LlamaForCausalLM", [None, None], None),
    "mistral": ("MistralConfig", {**LLAMA, "sliding_window": 4}, "MistralForCausalLM", [-3, -3], None),
    "gemma2": (
        "Gemma2Config",
        {**LLAMA, "sliding_window": 4, "query_pre_attn_scalar": 8},
        "Gemma2ForCausalLM",
        [-3, None],
        50.0,
    ),
    "gpt2": ("GPT2Config", {**GPT, **NO_DROPOUT}, "GPT2LMHeadModel", [None, None], None),
    "gpt_neo": ("GPTNeoConfig", NEO, "GPTNeoForCausalLM", [None, -3], None),
    "opt": ("OPTConfig", OPT, "OPTForCausalLM", [None, None], None),
    "vit": ("ViTConfig", VIT, "ViTForImageClassification", [None, None], None),
}
EAGER_ONLY = ("gemma2", "gpt_neo")

RUNS = [
    (name, impl, "train", None)
    for name in MODELS
    for impl in ("eager", "sdpa")
    if impl == "eager" or name not in EAGER_ONLY
]
RUNS += [("llama", "sdpa", "eval", None), ("gemma2", "eager", "eval", None)]
RUNS += [("llama", "eager", "train", True), ("mistral", "sdpa", "train", True), ("gemma2", "eager", "train", True)]


@pytest.mark.parametrize(("name", "impl", "mode", "dynamic"), RUNS)
def test_model(name: str, impl: str, mode: str, dynamic: bool | None) -> None:
    config, arguments, kind, windows, softcap = MODELS[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    settings = getattr(transformers, config)(**arguments, attn_implementation=impl)
    model = getattr(transformers, kind)(settings).train(mode == "train")
    if name == "vit":
        inputs: dict[str, Any] = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    else:
        ids = torch.randint(0, 32, (2, 12))
        inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    backend = Rewriter()

    def run(module: Any) -> dict[str, torch.Tensor]:
        model.zero_grad()
        out = module(**inputs)
        out.loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return {"logits": out.logits.detach(), **grads}

    actual, expected = run(torch.compile(model, backend=backend, dynamic=dynamic)), run(model)
    assert [s.reason for s in backend.sites] == [None, None]
    upper = None if name == "vit" else 0
    specs = [s.spec for s in backend.sites if s.spec is not None]
    assert [(s.mask.lower, s.mask.upper, s.softcap) for s in specs] == [(w, upper, softcap) for w in windows]
    assert all("attn" in (s.module or "") or "attention" in (s.module or "") for s in backend.sites)
    largest = max(float(e.abs().max()) for n, e in expected.items() if n != "logits")
    for key, e in expected.items():
        # gradients that are zero by symmetry (key biases) are the rounding of sums of larger ones
        size = float(e.abs().max()) if key == "logits" else largest
        torch.testing.assert_close(actual[key], e, atol=64 * torch.finfo(e.dtype).eps * size, rtol=1e-5, msg=key)


def test_attention_weights_are_kept() -> None:
    """output_attentions=True returns the probabilities: nothing may be replaced."""
    torch._dynamo.reset()
    settings = transformers.LlamaConfig(**LLAMA, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(settings).eval()
    backend = Rewriter()
    ids = torch.randint(0, 32, (2, 12))
    with torch.no_grad():
        out = torch.compile(model, backend=backend)(input_ids=ids, output_attentions=True, use_cache=False)
        expected = model(input_ids=ids, output_attentions=True, use_cache=False)
    assert backend.sites and not any(s.replaced for s in backend.sites)
    for a, b in zip(out.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(a, b)
