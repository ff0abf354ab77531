"""What looks like attention and must not be replaced, or not as it looks.  Outputs and gradients stay eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo.compare import TOLERANCE, distance, run, without_dropout
from zoo.measure import Coverage, pass_then
from zoo.registry import build

Tensor = torch.Tensor
HEADS, LENGTH, DIM = 4, 12, 8


def split(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x.view(x.shape[0], LENGTH, 3, HEADS, DIM).permute(2, 0, 3, 1, 4)
    return q, k, v


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q, k.transpose(-1, -2)) * DIM**-0.5


def future() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


# Left alone, because the op can't mean them.  Each takes q, k, v and weights [HEADS, HEADS] to mix with.


def probabilities_are_returned(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    p = scores_of(q, k).softmax(-1)
    return p @ v, p


def probabilities_have_another_user(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    p = scores_of(q, k).softmax(-1)
    return p @ v, -(p * (p + 1e-9).log()).sum(-1)


def scores_have_another_user(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    s = scores_of(q, k)
    return s.softmax(-1) @ v, s.amax(-1)


def softmax_over_queries(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    return scores_of(q, k).softmax(-2) @ v


def softmax_over_heads(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    return scores_of(q, k).softmax(1) @ v


def top_k_of_the_scores(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    s = scores_of(q, k)
    least = s.topk(4, -1).values[..., -1:]
    return s.masked_fill(s < least, float("-inf")).softmax(-1) @ v


def mask_after_softmax(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    return scores_of(q, k).softmax(-1).masked_fill(future(), 0.0) @ v


def renormalised_probabilities(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    p = scores_of(q, k).softmax(-1).masked_fill(future(), 0.0)
    return (p / p.sum(-1, keepdim=True)) @ v


def talking_heads(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    return torch.einsum("bhij,hg->bgij", scores_of(q, k), w).softmax(-1) @ v


def talking_heads_after_softmax(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    return torch.einsum("bhij,hg->bgij", scores_of(q, k).softmax(-1), w) @ v


def scores_through_another_function(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    return F.relu(scores_of(q, k)).softmax(-1) @ v


def linear_attention(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    return q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v)


def double_softmax(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    return scores_of(q, k).softmax(-1).softmax(-1) @ v


def difference_of_two_softmaxes(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    return (scores_of(q, k).softmax(-1) - 0.5 * scores_of(k, q).softmax(-1)) @ v


def a_slice_of_the_probabilities(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    return scores_of(q, k).softmax(-1)[..., 1:] @ v[..., 1:, :]


LEFT_ALONE = [
    probabilities_are_returned,
    probabilities_have_another_user,
    scores_have_another_user,
    softmax_over_queries,
    softmax_over_heads,
    top_k_of_the_scores,
    mask_after_softmax,
    renormalised_probabilities,
    talking_heads,
    talking_heads_after_softmax,
    scores_through_another_function,
    linear_attention,
    double_softmax,
    difference_of_two_softmaxes,
    a_slice_of_the_probabilities,
]

# Replaced or not: right in any case.


def mask_written_into_the_scores(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    s = scores_of(q, k)
    s.masked_fill_(future(), float("-inf"))
    return s.softmax(-1) @ v


def mask_written_through_a_view(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    s = scores_of(q, k)
    s[..., 1:, 0] = float("-inf")
    return s.softmax(-1) @ v


def key_written_after_the_scores(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    k = k.clone()
    s = scores_of(q, k)
    k.zero_()
    return s.softmax(-1) @ v + k


def value_written_after_softmax(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    v = v.clone()
    p = scores_of(q, k).softmax(-1)
    v.mul_(2.0)
    return p @ v


def probabilities_scaled(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    return (scores_of(q, k).softmax(-1) * w[0].view(1, HEADS, 1, 1)) @ v


def bias_of_the_queries_activations(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    bias = torch.einsum("bhid,bhjd->bhij", q.tanh(), v)
    return (scores_of(q, k) + bias).softmax(-1) @ v


def mask_of_the_keys_activations(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    hidden = (k.sum(-1) > 1.0) & (torch.arange(LENGTH) > 0)
    return scores_of(q, k).masked_fill(hidden[:, :, None, :], float("-inf")).softmax(-1) @ v


def scale_of_each_head(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    return (scores_of(q, k) * w[0].view(1, HEADS, 1, 1)).softmax(-1) @ v


def temperature_of_each_query(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    return (scores_of(q, k) * torch.arange(1.0, LENGTH + 1)[:, None]).softmax(-1) @ v


def mask_before_the_scale(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    s = torch.matmul(q, k.transpose(-1, -2)).masked_fill(future(), -3.0)  # -3 hides nothing
    return (s * DIM**-0.5).softmax(-1) @ v


def softcap_after_the_bias(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    s = scores_of(q, k) + torch.arange(float(LENGTH))
    return (5.0 * torch.tanh(s / 5.0)).softmax(-1) @ v


def transposed_probabilities(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    return scores_of(q, k).softmax(-1).transpose(-1, -2) @ v


def keys_of_another_head(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    return scores_of(q, k.flip(1)).softmax(-1) @ v


EITHER = [
    mask_written_into_the_scores,
    mask_written_through_a_view,
    key_written_after_the_scores,
    value_written_after_softmax,
    probabilities_scaled,
    bias_of_the_queries_activations,
    mask_of_the_keys_activations,
    scale_of_each_head,
    temperature_of_each_query,
    mask_before_the_scale,
    softcap_after_the_bias,
    transposed_probabilities,
    keys_of_another_head,
]


class Model(nn.Module):
    def __init__(self, attention: Callable[..., Any]) -> None:
        super().__init__()
        self.qkv, self.attention = nn.Linear(16, 3 * HEADS * DIM), attention
        self.w = nn.Parameter(torch.rand(HEADS, HEADS) + 0.5)

    def forward(self, x: Tensor) -> Any:
        return self.attention(*split(self.qkv(x)), self.w)


def replaced_and_right(model: nn.Module, inputs: dict[str, Any]) -> int:
    """How many sites were replaced; fails if an output or a gradient isn't eager's."""
    ours, coverage = copy.deepcopy(model), Coverage()
    outputs, gradients = run(model, model, inputs, True)
    compiled = torch.compile(ours, backend=pass_then(None, coverage), dynamic=False)
    our_outputs, our_gradients = run(compiled, ours, inputs, True)
    assert outputs.keys() == our_outputs.keys() and gradients.keys() == our_gradients.keys()
    for name, x in {**outputs, **gradients}.items():
        largest = max(g.norm().item() for g in gradients.values()) if name in gradients else 0.0
        assert distance({**our_outputs, **our_gradients}[name], x, 1e-3 * largest) <= TOLERANCE, name
    return coverage.reported


@pytest.mark.parametrize("attention", LEFT_ALONE, ids=lambda f: f.__name__)
def test_left_alone(attention: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    assert replaced_and_right(Model(attention), {"x": torch.randn(2, LENGTH, 16)}) == 0


@pytest.mark.parametrize("attention", EITHER, ids=lambda f: f.__name__)
def test_right_whether_replaced_or_not(attention: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    replaced_and_right(Model(attention), {"x": torch.randn(2, LENGTH, 16)})


def test_copies_for_nobody_are_no_users() -> None:
    """x-transformers keeps copies of the scores for a record that may be dropped."""

    def attention(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
        s = scores_of(q, k)
        _record = {"scores": s.clone(), "detached": s.double().detach()}
        return s.softmax(-1) @ v

    torch.manual_seed(0)
    assert replaced_and_right(Model(attention), {"x": torch.randn(2, LENGTH, 16)}) == 1


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_output_attentions(name: str) -> None:
    model, inputs = build(name, "eager")
    model = without_dropout(model)
    model.config.output_attentions = True
    assert replaced_and_right(model, inputs) == 0


def test_weights_that_are_used() -> None:
    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            return self.attention(x, x, x, need_weights=True)

    torch.manual_seed(0)
    assert replaced_and_right(Weights(), {"x": torch.randn(2, LENGTH, 16)}) == 0


def test_routers_of_experts() -> None:
    model, inputs = build("mixtral", "eager")
    assert replaced_and_right(model, inputs) == 2  # one attention in each layer, and no router


def test_buffer_changed_after_compilation() -> None:
    """The value of a mask's buffer is read when compiling: a change must compile again, or be followed."""
    model, inputs = build("nanogpt_eager")
    model = without_dropout(model)
    coverage = Coverage()
    compiled = torch.compile(model, backend=pass_then(None, coverage), dynamic=False)
    before = compiled(**inputs)
    for block in model.blocks:
        block.attention.bias.triu_(-1).add_(torch.eye(64))  # only the last two keys
    after, eager = compiled(**inputs), model(**inputs)
    assert coverage.reported >= 2
    assert distance(before, eager) > 10 * TOLERANCE
    assert distance(after, eager) <= TOLERANCE
