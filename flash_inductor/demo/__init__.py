"""The demo: a small language model trained with stock ``torch.compile`` and with the plugin, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from .model import LanguageModel


def make() -> tuple[LanguageModel, tuple[Tensor, Tensor]]:
    """The model for a CPU, and (tokens, targets): the example ``flash-inductor explain flash_inductor.demo:make``."""
    from .settings import Settings
    from .worker import batches, make_model

    settings = Settings()
    return make_model(settings), next(batches(settings, 1))
