"""Generation with attn_implementation="flash_inductor" gives the tokens that eager attention gives."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers

from .models import DECODERS, assert_close, batch, decoders, pair

NAMES = ("llama", "gemma2", "gpt_oss", "llama4")


def generate(model: Any, kind: str, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    inputs = {key: x for key, x in batch(kind, length=9).items() if key != "labels"}
    return model.generate(**inputs, max_new_tokens=7, do_sample=False, output_logits=True, **options)


@pytest.mark.usefixtures("exact_softmax")
@pytest.mark.parametrize("cache", ["dynamic", "static", None])
@pytest.mark.parametrize("kind", ["plain", "left"])
@pytest.mark.parametrize("name", NAMES)
def test_greedy(name: str, kind: str, cache: str | None) -> None:
    options = {"use_cache": False} if cache is None else {"cache_implementation": cache}
    results = [generate(model.eval(), kind, return_dict_in_generate=True, **options) for model in decoders(name)]
    assert torch.equal(results[0].sequences, results[1].sequences)
    eager, ours = ({str(i): x for i, x in enumerate(result.logits)} for result in results)
    assert_close(eager, ours)


@pytest.mark.usefixtures("exact_softmax")
def test_decoding_with_a_static_cache_compiles_once() -> None:
    """The position of a token is a tensor there, so that no step compiles again."""
    eager, ours = (model.eval() for model in decoders("llama", layers=1))
    frames: list[Any] = []

    def count(module: Any, inputs: Any) -> Any:
        frames.append(module)
        return module

    step = torch.compile(ours, backend=count, fullgraph=True)
    caches = [transformers.StaticCache(config=model.config, max_cache_len=16) for model in (eager, ours)]
    tokens = batch("plain", length=6)["input_ids"]
    with torch.no_grad():
        logits = [model(tokens, cache=cache).logits[:, -1:] for model, cache in zip((eager, ours), caches, strict=True)]
        for i in range(3):
            assert_close({"logits": logits[0]}, {"logits": logits[1]})
            following = logits[0].argmax(-1)
            position = torch.tensor([[6 + i]])
            logits = [
                model(following, cache=cache, position_ids=position).logits
                for model, cache in zip((eager, step), caches, strict=True)
            ]
    assert len(frames) == 1


@pytest.mark.usefixtures("exact_softmax")
def test_beams_of_an_encoder_and_decoder() -> None:
    config = transformers.BartConfig(
        vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
    )  # fmt: skip
    models = pair(config, transformers.BartForConditionalGeneration._from_config)
    results = [generate(model.eval(), "right", num_beams=2, return_dict_in_generate=True) for model in models]
    assert torch.equal(results[0].sequences, results[1].sequences)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_on_a_gpu(name: str, cache: str) -> None:
    """In float32, decoding through transformers' SDPA, and compiled by ``generate`` where the cache is static."""
    chunked = inspect.signature(transformers.masking_utils.create_chunked_causal_mask).parameters
    if name == "llama4" and cache == "static" and "block_sequence_ids" not in chunked:
        pytest.skip("this transformers fails with chunked attention and a static cache, ours or not")
    torch.set_float32_matmul_precision("highest")
    sequences = []
    for model in decoders(name, torch.float32):
        torch.manual_seed(0)
        tokens = batch("left", length=9)
        inputs = {key: tokens[key].cuda() for key in ("input_ids", "attention_mask")}
        sequences.append(
            model.cuda().eval().generate(**inputs, max_new_tokens=7, do_sample=False, cache_implementation=cache)
        )
    assert torch.equal(*sequences)
