"""A reduced zoo: every site is replaced, and outputs and gradients are eager's.  benchmarks/coverage.py runs it all.

Counting needs dropout on, the comparison off; graphs are run without Inductor, which other tests are for.
"""

from __future__ import annotations

import pytest
import torch
from zoo import REGISTRY
from zoo.compare import compare, has_dropout
from zoo.measure import measure
from zoo.modes import MODES

# Model, implementation, mode, number of sites.  One of each kind of graph that real models give.
CASES = [
    ("llama", "sdpa", "right", 2),  # causal and padding, repeat_kv
    ("llama", "eager", "packed", 2),  # documents from position_ids
    ("llama", "sdpa", "checkpoint", 2),  # in the bodies of a higher-order op
    ("mistral", "eager", "left", 2),  # window and padding
    ("mistral", "sdpa", "dynamic", 2),
    ("llama", "sdpa", "mask4d", 2),  # an opaque mask
    ("gemma2", "eager", "right", 2),  # softcap
    ("gpt2", "eager", "train", 2),  # dropout
    ("gpt2", "sdpa", "right", 2),
    ("gpt_neo", "eager", "train", 2),  # masks in buffers
    ("bloom", "eager", "left", 2),  # ALiBi through baddbmm
    ("deepseek_v3", "sdpa", "train", 2),  # keys written in place, value heads of another size
    ("gpt_oss", "eager", "right", 2),  # sinks
    ("llama4", "sdpa", "right", 2),  # chunks
    ("mixtral", "sdpa", "train", 2),  # the routers' softmax isn't attention
    ("bert", "sdpa", "right", 2),
    ("bert", "eager", "left", 2),
    ("deberta_v2", "eager", "right", 2),  # a bias made of activations
    ("t5", "sdpa", "right", 6),  # a learned bias
    ("t5", "eager", "train", 6),
    ("bart", "eager", "right", 6),  # cross-attention
    ("swin", "eager", "train", 4),  # shifted windows
    ("sam", "sdpa", "train", 9),
    ("siglip", "eager", "left", 5),
    ("nanogpt_eager", "eager", "train", 2),
    ("hand_alibi_sdpa", "sdpa", "train", 2),
    ("hand_grouped_einsum_softcap", "eager", "train", 2),
    ("mha_needweights", "default", "train", 2),  # asked for and not used
    ("mha_causal", "default", "train", 2),
    ("tel_padding", "default", "train", 2),
    ("nn_transformer", "default", "train", 3),
]


@pytest.mark.parametrize(("name", "implementation", "mode", "sites"), CASES, ids=["-".join(c[:3]) for c in CASES])
def test_every_site_is_replaced_and_right(name: str, implementation: str, mode: str, sites: int) -> None:
    entry, how = REGISTRY[name], MODES[mode]
    if not entry.available:
        pytest.skip(f"{entry.library} isn't installed")
    model, inputs = how.make(entry, implementation)
    if how.train and has_dropout(model):
        coverage = measure(model, inputs, train=how.train, dynamic=how.dynamic)
        assert (coverage.replaced, coverage.sites) == (sites, sites), coverage.left
    comparison, coverage = compare(model, inputs, train=how.train, dynamic=how.dynamic)
    assert (coverage.replaced, coverage.sites) == (sites, sites), coverage.left
    assert coverage.reported == sites
    assert comparison.right, comparison


def test_models_use_nothing_downloaded_and_are_the_same_each_time() -> None:
    for name in ("llama", "nanogpt_eager"):
        (first, inputs), (second, again) = (MODES["train"].make(REGISTRY[name], "eager") for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
        assert all(torch.equal(v, again[k]) for k, v in inputs.items() if isinstance(v, torch.Tensor))
