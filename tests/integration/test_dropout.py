"""Active dropout through Inductor on the CPU: the random state is drawn in the graph, by torch's rules."""

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import flash_inductor
from flash_inductor.report import collect

P = 0.4


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=P, is_causal=True)


def eager_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.softmax(q @ k.mT * 0.25, -1), P) @ v


def checkpointed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return checkpoint(attend, checkpoint(attend, q, k, v, use_reentrant=False), k, v, use_reentrant=False)


def twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attend(attend(q, k, v), k, v)


def step(fn, inputs, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    out = fn(*inputs)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


@pytest.fixture(params=[False, True], ids=["inductor_random", "fallback_random"])
def random_of_eager(request):
    with inductor_config.patch(fallback_random=request.param):
        yield request.param


@pytest.mark.parametrize("fn", [attend, eager_attend, checkpointed, twice])
def test_a_seed_makes_a_step_repeatable(qkv, fn, random_of_eager: bool) -> None:
    with flash_inductor.enabled(), collect() as sites:
        compiled = torch.compile(fn)
        first, again, other = (step(compiled, qkv, seed) for seed in (1, 1, 2))
    assert sites and all(s.replaced for s in sites)
    torch.testing.assert_close(first, again, atol=0, rtol=0)
    assert not torch.allclose(first[0], other[0])


def test_the_state_is_that_of_eager_with_fallback_random(qkv) -> None:
    """With fallback_random the graph draws what eager mode draws for the same seed: the op's own state."""
    with flash_inductor.enabled(), inductor_config.patch(fallback_random=True):
        actual = step(torch.compile(attend), qkv, 3)

    def by_hand(q, k, v):
        state = torch.randint(0, 2**62, (2,), dtype=torch.int64)
        return flash_inductor.attention(q, k, v, is_causal=True, dropout_p=P, rng_state=state)

    torch.testing.assert_close(actual, step(by_hand, qkv, 3))


def test_checkpoint_recomputes_with_the_same_state(qkv, random_of_eager: bool) -> None:
    """The forward of a checkpointed function runs again in the backward; another state would give other gradients."""
    with flash_inductor.enabled():
        kept, recomputed = (step(torch.compile(fn, fullgraph=True), qkv, 5) for fn in (twice, checkpointed))
    torch.testing.assert_close(kept, recomputed)


def test_gradients_are_those_of_the_dropped_attention(qkv) -> None:
    """For a fixed state the function is smooth: the gradient is the slope."""
    q, k, v = (x.detach().double().requires_grad_() for x in qkv)
    direction = torch.randn_like(q)
    with flash_inductor.enabled(), collect() as sites:
        compiled = torch.compile(attend)

        def loss(q: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(7)
            return compiled(q, k, v).square().sum()

        (grad,) = torch.autograd.grad(loss(q), q)
        h = 1e-5
        with torch.no_grad():
            slope = (loss(q + h * direction) - loss(q - h * direction)) / (2 * h)
    assert all(s.replaced for s in sites)
    torch.testing.assert_close(slope, (grad * direction).sum(), rtol=1e-6, atol=1e-6)


def test_no_dropout_in_evaluation(qkv) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.dropout(torch.softmax(q @ k.mT * 0.25, -1), P, self.training) @ v

    model = Model().eval()
    with flash_inductor.enabled(), collect() as sites:
        actual = torch.compile(model)(*qkv)
    assert [s.spec.extras for s in sites if s.spec is not None] == [()]
    torch.testing.assert_close(actual, model(*qkv))
