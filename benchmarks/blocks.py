"""Training steps of models that flash attention does not usually reach: dropout, padding, biases, sinks, chunks.

    python benchmarks/blocks.py --out blocks.json             one GPU, bf16, all models
    python benchmarks/blocks.py --models gpt_oss --impls eager,ours-eager
    python benchmarks/blocks.py --no-dropout                  losses can be compared: dropout draws other numbers
    python benchmarks/blocks.py --device cpu --tiny           the same code with toy sizes

A few layers of Hugging Face's models at random weights, in training mode, with the dropout of their configs and a
right-padded batch.  Stock ``torch.compile`` with the model's implementations, and "ours-X", which is the same with
``flash_inductor.enabled()``.  Steps and memory are measured as in ``e2e.py``.  gpt-oss has no SDPA in transformers.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

from cells import Cell, add_arguments, finish_arguments, measure_steps, run

# cells first: it sets what torch reads when it is imported
# isort: split
import torch
import transformers

IMPLS = ("sdpa", "eager", "ours-sdpa", "ours-eager")
IGNORED = -100


@dataclass(frozen=True)
class Model:
    """Class names in transformers, the config's arguments, what tiny sizes change, and the batch."""

    model: str
    config: str
    arguments: dict[str, Any]
    tiny: dict[str, Any]
    batch: int
    length: int
    sites: int  # attention sites in all its layers
    target: int = 0  # length of the decoder's side, of models that have one


_TINY_GROUPED = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "vocab_size": 256,
}
_SIZES = {"num_hidden_layers": 2, "vocab_size": 32000}
MODELS = {
    "gpt2": Model(  # GPT-2 medium
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 1024, "n_head": 16, "n_layer": 4, "n_positions": 2048},
        {"n_embd": 64, "n_head": 4, "vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2},
        batch=8,
        length=2048,
        sites=4,
    ),
    "bert": Model(  # BERT large
        "BertForMaskedLM",
        "BertConfig",
        {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 4},
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "vocab_size": 256,
        },
        batch=32,
        length=512,
        sites=4,
    ),
    "t5": Model(  # T5 large
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_heads": 16, "num_layers": 2, "decoder_start_token_id": 0},
        {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "vocab_size": 256},
        batch=8,
        length=1024,
        sites=6,
        target=1024,
    ),
    "gpt_oss": Model(  # gpt-oss 20B with 4 experts
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **_SIZES,
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {**_TINY_GROUPED, "sliding_window": 16},
        batch=1,
        length=4096,
        sites=2,
    ),
    "llama4": Model(  # Llama-4 Scout with dense layers and shorter chunks
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **_SIZES,
            "hidden_size": 5120,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 8192,
            "moe_layers": [],
            "attention_chunk_size": 2048,
            "no_rope_layers": [1, 0],
        },
        {**_TINY_GROUPED, "attention_chunk_size": 16, "intermediate_size_mlp": 96},
        batch=1,
        length=8192,
        sites=2,
    ),
}


def build(it: Model, implementation: str, args: argparse.Namespace) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model and the inputs of its forward; the same ones for each implementation."""
    config = getattr(transformers, it.config)(**{**it.arguments, **(it.tiny if args.tiny else {}), "pad_token_id": 0})
    config._attn_implementation = implementation
    config.use_cache = False
    torch.manual_seed(args.seed)
    model = getattr(transformers, it.model)(config).to(args.device, args.dtype).train()
    if args.no_dropout:
        _turn_off_dropout(model)
    batch, length, target = (2, 64, 48 if it.target else 0) if args.tiny else (it.batch, it.length, it.target)
    tokens = torch.randint(1, config.vocab_size, (batch, length))
    lengths = torch.linspace(length, length // 2, batch).long() if batch > 1 else torch.tensor([length * 7 // 8])
    mask = (torch.arange(length) < lengths[:, None]).long()
    labels = torch.randint(1, config.vocab_size, (batch, target)) if target else tokens.masked_fill(mask == 0, IGNORED)
    inputs = {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels}
    return model, {name: x.to(args.device) for name, x in inputs.items()}


def _turn_off_dropout(model: torch.nn.Module) -> None:
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            for name in [n for n, v in vars(owner).items() if isinstance(v, float)] if owner is not None else ():
                if "drop" in name or (name == "p" and isinstance(module, torch.nn.Dropout)):
                    setattr(owner, name, 0.0)


def measure(name: str, impl: str, args: argparse.Namespace) -> Cell:
    """One cell; see ``cells.measure_steps``."""
    model, inputs = build(MODELS[name], impl.removeprefix("ours-"), args)
    return measure_steps(Cell(name, impl, MODELS[name].sites), model, inputs, args)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--impls", default=",".join(IMPLS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--no-dropout", action="store_true", help="set dropout to zero, and compare the losses")
    add_arguments(parser)
    args = parser.parse_args(argv)
    finish_arguments(parser, args, {"models": MODELS, "impls": IMPLS})
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)

    def compared(name: str) -> bool:
        return args.no_dropout or name in ("gpt_oss", "llama4")  # these have no dropout by default

    return run(__file__, measure, "--models", args, sys.argv[1:] if argv is None else argv, compared)


if __name__ == "__main__":
    sys.exit(main())
