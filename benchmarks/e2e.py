"""Training steps of real model families: stock torch.compile with each attention implementation, and with the plugin.

    python benchmarks/e2e.py --out results.json                  one GPU, bf16, all families
    python benchmarks/e2e.py --families gemma2 --impls eager,ours-eager
    python benchmarks/e2e.py --device cpu --tiny                 the same code with toy sizes

Models are Hugging Face's at random weights.  A step is forward, loss and backward, without the optimizer.  Before the
timed steps a few steps with plain SGD give the losses that are compared.  "ours-X" is the model with implementation X
under plain ``torch.compile`` with ``flash_inductor.enabled()``.  A cell that fails says so and the others go on.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

from cells import STOCK, Cell, add_arguments, finish_arguments, measure_steps, run

# cells first: it sets what torch reads when it is imported
# isort: split
import torch
import transformers

IMPLS = (*STOCK, "ours-sdpa", "ours-eager")


@dataclass(frozen=True)
class Family:
    """A model family: class names in transformers, the config's arguments, and the training shape."""

    model: str
    config: str
    arguments: dict[str, Any]
    tiny: dict[str, Any]
    batch: int
    length: int


_ROPE = {"num_hidden_layers": 2, "vocab_size": 32000}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
_7B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
_2B = {"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4}
_GPT2 = {"n_positions": 4096, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
FAMILIES = {
    "llama3-8b": Family("LlamaForCausalLM", "LlamaConfig", {**_ROPE, **_7B}, _TINY, batch=2, length=4096),
    "mistral-7b": Family(
        "MistralForCausalLM",
        "MistralConfig",
        {**_ROPE, **_7B, "sliding_window": 1024},
        {**_TINY, "sliding_window": 16},
        batch=1,
        length=8192,
    ),
    "gemma2-2b": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_ROPE, **_2B, "head_dim": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0},
        {**_TINY, "head_dim": 16, "sliding_window": 16},
        batch=1,
        length=8192,
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {**_GPT2, "n_layer": 4},
        {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256},
        batch=4,
        length=4096,
    ),
}


def build(family: Family, implementation: str, args: argparse.Namespace) -> tuple[torch.nn.Module, torch.Tensor, int]:
    """The model, its tokens [batch, length], and its number of layers; the same ones for each implementation."""
    arguments = {**family.arguments, **(family.tiny if args.tiny else {})}
    config = getattr(transformers, family.config)(**arguments)
    config._attn_implementation = implementation
    config.use_cache = False
    torch.manual_seed(args.seed)
    model = getattr(transformers, family.model)(config).to(args.device, args.dtype).train()
    batch, length = (2, 64) if args.tiny else (family.batch, family.length)
    tokens = torch.randint(0, config.vocab_size, (batch, length)).to(args.device)
    return model, tokens, config.num_hidden_layers


def measure(name: str, impl: str, args: argparse.Namespace) -> Cell:
    """One cell; see ``cells.measure_steps``."""
    model, tokens, layers = build(FAMILIES[name], impl.removeprefix("ours-"), args)
    return measure_steps(Cell(name, impl, layers), model, {"input_ids": tokens, "labels": tokens}, args)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--impls", default=",".join(IMPLS), help="comma-separated (default: %(default)s)")
    add_arguments(parser)
    args = parser.parse_args(argv)
    finish_arguments(parser, args, {"families": FAMILIES, "impls": IMPLS})
    return args


def main(argv: list[str] | None = None) -> int:
    return run(__file__, measure, "--families", parse(argv), sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
