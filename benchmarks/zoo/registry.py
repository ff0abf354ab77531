"""The table of the zoo's entries, and the sizes and inputs they share."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BATCH, LENGTH, VOCABULARY, HIDDEN, INTERMEDIATE = 2, 32, 128, 64, 128
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 16, 2
WINDOW = 8  # below LENGTH, or a window would not matter
PADDED = 5  # padded tokens, in the last sequence of the batch
LABEL_IGNORED = -100

Inputs = dict[str, Any]
Make = Callable[..., tuple[nn.Module, Inputs]]


@dataclass(frozen=True)
class Entry:
    """One architecture.  ``make(impl, train=, padding=)`` gives a model and the keyword arguments of its forward."""

    name: str
    family: str
    implementations: tuple[str, ...]  # the library's default first
    library: str
    make: Make
    paddable: bool = False  # takes attention_mask

    @property
    def available(self) -> bool:
        return importlib.util.find_spec(self.library) is not None


REGISTRY: dict[str, Entry] = {}


def entry(
    name: str, family: str, implementations: tuple[str, ...], library: str, *, paddable: bool = False
) -> Callable[[Make], Make]:
    """Put a maker into the registry."""

    def register(make: Make) -> Make:
        if name in REGISTRY:
            raise ValueError(f"name: {name!r} is taken")
        REGISTRY[name] = Entry(name, family, implementations, library, make, paddable)
        return make

    return register


def build(
    name: str, implementation: str | None = None, *, train: bool = True, padding: str | None = None, seed: int = 0
) -> tuple[nn.Module, Inputs]:
    """The model of an entry and the keyword arguments of its forward; ``padding``: None, "right" or "left"."""
    if padding not in (None, "right", "left"):
        raise ValueError(f"padding: expected None, 'right' or 'left', got {padding!r}")
    it = REGISTRY[name]
    if padding and not it.paddable:
        raise ValueError(f"padding: {name} takes no attention_mask")
    torch.manual_seed(seed)
    model, inputs = it.make(implementation or it.implementations[0], train=train, padding=padding)
    return model.train(train), inputs


def tokens(length: int = LENGTH) -> torch.Tensor:
    """Random tokens [batch, length], none of them special."""
    return torch.randint(3, VOCABULARY, (BATCH, length))


def images(size: int = 32) -> torch.Tensor:
    return torch.randn(BATCH, 3, size, size)


def text(padding: str | None) -> Inputs:
    """``input_ids``, and ``attention_mask`` with the padded tokens zero if there is padding."""
    ids = tokens()
    if padding is None:
        return {"input_ids": ids}
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    hidden = slice(LENGTH - PADDED, None) if padding == "right" else slice(0, PADDED)
    mask[-1, hidden] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def labels(inputs: Inputs) -> torch.Tensor:
    """The tokens as labels, with padding ignored, and what a causal model would predict from padding."""
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    if mask is None:
        return ids.clone()
    after_visible = nn.functional.pad(mask, (1, 0))[:, :-1]
    return ids.masked_fill((mask == 0) | (after_visible == 0), LABEL_IGNORED)


def given(**arguments: Any) -> dict[str, Any]:
    """The arguments that aren't ``...``: an override of ``...`` takes a default away."""
    return {name: value for name, value in arguments.items() if value is not ...}


def transformers_model(model: str, config: Any, implementation: str) -> nn.Module:
    import transformers

    made: nn.Module = getattr(transformers, model)._from_config(config, attn_implementation=implementation)
    return made


def transformers_config(name: str, **arguments: Any) -> Any:
    import transformers

    return getattr(transformers, name)(**arguments)
