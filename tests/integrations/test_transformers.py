"""attn_implementation="flash_inductor" against eager attention: logits, loss and every gradient, in float64."""

from __future__ import annotations

import pytest

from .models import DECODERS, assert_close, batch, decoders, losses_and_gradients

KINDS = ("plain", "right", "left", "packed")


@pytest.mark.usefixtures("exact_softmax")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DECODERS)
def test_equals_eager(name: str, kind: str) -> None:
    eager, ours = decoders(name)
    inputs = batch(kind)
    assert_close(losses_and_gradients(eager, inputs), losses_and_gradients(ours, inputs))
