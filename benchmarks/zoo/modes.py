"""The ways in which a model is run: training, evaluation, padding, and what changes its graph beside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .registry import BATCH, LENGTH, Entry, Inputs, build

Prepare = Callable[[nn.Module, Inputs], None]


@dataclass(frozen=True)
class Mode:
    """``prepare`` changes model and inputs in place; None where the library's defaults do."""

    train: bool = True
    padding: str | None = None
    dynamic: bool = False
    decoders_only: bool = False
    prepare: Prepare | None = None

    def applies(self, entry: Entry) -> bool:
        if self.decoders_only:
            return "decoder" in entry.family and entry.library == "transformers"
        return self.padding is None or entry.paddable

    def make(self, entry: Entry, implementation: str) -> tuple[nn.Module, Inputs]:
        model, inputs = build(entry.name, implementation, train=self.train, padding=self.padding)
        if self.prepare is not None:
            self.prepare(model, inputs)
        return model, inputs


def _checkpoint(model: Any, inputs: Inputs) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def _packed(model: nn.Module, inputs: Inputs) -> None:
    """Two documents in each row, told apart by positions that start again."""
    cut = torch.tensor([[LENGTH // 2], [LENGTH // 4]])
    at = torch.arange(LENGTH).expand(BATCH, LENGTH)
    inputs["position_ids"] = torch.where(at < cut, at, at - cut)


def _cache(model: nn.Module, inputs: Inputs) -> None:
    inputs["use_cache"] = True


def _mask_4d(model: nn.Module, inputs: Inputs) -> None:
    """A mask that is an input, with a value for each query: nothing is known of it when compiling."""
    seen = (torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.7).tril() | torch.eye(LENGTH, dtype=torch.bool)
    inputs["attention_mask"] = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


MODES = {
    "train": Mode(),
    "eval": Mode(train=False),
    "right": Mode(padding="right"),
    "left": Mode(padding="left"),
    "checkpoint": Mode(decoders_only=True, prepare=_checkpoint),
    "packed": Mode(decoders_only=True, prepare=_packed),
    "cache": Mode(decoders_only=True, prepare=_cache),
    "dynamic": Mode(decoders_only=True, dynamic=True),
    "mask4d": Mode(decoders_only=True, prepare=_mask_4d),
}
MAIN = ("train", "eval", "right", "left")
