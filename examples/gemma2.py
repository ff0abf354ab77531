"""Fine-tune Gemma 2 with Transformers: grouped heads, softcap, a sliding window in every other layer.

    python examples/gemma2.py                                    a small random model, nothing is downloaded
    python examples/gemma2.py --model google/gemma-2-2b --text FILE

The model is Transformers' own, unchanged.  Its "eager" attention writes all of that out, which is what the plugin
finds; "sdpa" has no softcap.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, arguments, compare
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,  # the one with a window: on a CPU two take about a minute
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 64,
}
LARGE = {**SMALL, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}  # fmt: skip


class Loss(nn.Module):
    """Tokens [batch, length] to the mean cross entropy of the next ones."""

    def __init__(self, name: str | None) -> None:
        super().__init__()
        if name is None:
            config = Gemma2Config(**(SMALL if DEVICE == "cpu" else LARGE), pad_token_id=0)
            self.model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        else:
            self.model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager")

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


def load_tokens(name: str | None, path: str | None) -> Tensor:
    """The tokens of a file, or of the language reference that every Python ships; bytes for the random model."""
    if path is None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[key] for key in sorted(topics))
    else:
        text = Path(path).read_text()
    if name is None:
        return torch.tensor(list(text.encode()))
    return AutoTokenizer.from_pretrained(name)(text, return_tensors="pt").input_ids[0]


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__, steps=10)
    parser.add_argument("--model", metavar="NAME", help="weights to start from, of the hub or a folder")
    parser.add_argument("--text", metavar="FILE", help="what to train on (default: Python's language reference)")
    parser.add_argument("--length", type=int, default=256 if DEVICE == "cpu" else 4096, help="tokens of a sequence")
    args = parser.parse_args(argv)
    tokens = load_tokens(args.model, args.text)
    if len(tokens) <= args.length:
        parser.error(f"--text: expected more than {args.length} tokens, got {len(tokens)}")
    starts = torch.randint(len(tokens) - args.length, (args.steps,), generator=torch.Generator().manual_seed(0))
    batches = [(tokens[s : s + args.length][None].to(DEVICE),) for s in starts.tolist()]
    rate = 1e-3 if args.model is None else 1e-5
    return 0 if compare(lambda: Loss(args.model), batches, stock=args.stock, learning_rate=rate) else 1


if __name__ == "__main__":
    sys.exit(main())
