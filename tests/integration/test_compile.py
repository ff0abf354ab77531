"""torch.compile with the switch on, end to end on the CPU: training, checkpoints, autocast, sizes, the backend."""

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import flash_inductor
from flash_inductor.report import collect

from .conftest import causal


class Block(nn.Module):
    """Pre-norm causal self-attention with grouped heads and a residual."""

    def __init__(self, dim: int = 32, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def output_and_grads(fn, inputs, parameters=()) -> list[torch.Tensor]:
    """The output, and the gradients of inputs and parameters, which start and end without."""
    out = fn(*inputs)
    out.square().sum().backward()  # reentrant checkpoints refuse autograd.grad
    grads = [x.grad for x in (*inputs, *parameters)]
    for x in (*inputs, *parameters):
        x.grad = None
    return [out.detach(), *grads]


def test_a_training_step_equals_eager() -> None:
    model = Block()
    x = torch.randn(2, 48, 32, requires_grad=True)
    parameters = list(model.parameters())
    expected = output_and_grads(model, [x], parameters)
    with flash_inductor.enabled(), collect() as sites:
        actual = output_and_grads(torch.compile(model), [x], parameters)
    assert [s.replaced for s in sites] == [True]
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_bodies_are_rewritten(qkv, reentrant: bool) -> None:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return checkpoint(causal, q, k, v, use_reentrant=reentrant)

    expected = output_and_grads(causal, qkv)
    with flash_inductor.enabled(), collect() as sites:
        actual = output_and_grads(torch.compile(run), qkv)
    assert [s.replaced for s in sites] == [True]
    torch.testing.assert_close(actual, expected)


def test_pitfall_3_metadata_is_made_in_dynamos_fake_mode(qkv) -> None:
    """The graph's fake tensors are Dynamo's, not those of the backend's fake mode: mixing them raises."""
    with flash_inductor.enabled():
        twice = torch.compile(lambda q, k, v: causal(causal(q, k, v), k, v), dynamic=True)
        torch.testing.assert_close(twice(*qkv), causal(causal(*qkv), *qkv[1:]))


def test_pitfall_4_a_mask_of_positions_is_not_triu_of_full(qkv) -> None:
    """Hugging Face models build the mask by gathering positions; looking for is_causal or triu finds nothing."""

    def positions(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        where = torch.arange(q.shape[2]).expand(q.shape[0], -1)
        batch = torch.arange(q.shape[0])[:, None, None]
        rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
        mask = (where[batch, rows] >= where[batch, columns])[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    with flash_inductor.enabled(), collect() as sites:
        out = torch.compile(positions)(*qkv)
    torch.testing.assert_close(out, causal(*qkv))
    assert [(s.replaced, s.spec and s.spec.mask.upper) for s in sites] == [(True, 0)], sites


def test_ten_lengths_compile_at_most_twice() -> None:
    flash_inductor.enable()
    compiled = torch.compile(causal)
    for length in range(16, 56, 4):
        q, k, v = (torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3))
        out = compiled(q, k, v)
        torch.testing.assert_close(out, causal(q, k, v))
        out.sum().backward()
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_gives_the_dtype_it_gives_in_eager(qkv, inside: bool) -> None:
    def with_autocast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return causal(q, k, v)

    flash_inductor.enable()
    with collect() as sites:
        if inside:
            out, expected = torch.compile(with_autocast)(*qkv), with_autocast(*qkv)
        else:
            with torch.autocast("cpu", torch.bfloat16):
                out, expected = torch.compile(causal)(*qkv), causal(*qkv)
        out.sum().backward()
    assert [s.replaced for s in sites] == [True]
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected)
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in qkv)


@pytest.mark.parametrize("on", [False, True])
def test_the_backend_by_name_rewrites_once_with_or_without_the_switch(qkv, on: bool) -> None:
    (flash_inductor.enable if on else flash_inductor.disable)()
    with collect() as sites:
        out = torch.compile(causal, backend="flash_inductor")(*qkv)
    torch.testing.assert_close(out, causal(*qkv))
    assert [s.replaced for s in sites] == [True]
    assert flash_inductor.is_enabled() is on


def test_the_backend_rewrites_checkpoint_bodies(qkv) -> None:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return checkpoint(causal, q, k, v, use_reentrant=False)

    with collect() as sites:
        actual = output_and_grads(torch.compile(run, backend="flash_inductor"), qkv)
    assert [s.replaced for s in sites] == [True]
    torch.testing.assert_close(actual, output_and_grads(causal, qkv))


def test_mode_and_options_reach_inductor(qkv) -> None:
    seen: list[tuple[bool, bool]] = []

    def look(graph: torch.fx.Graph) -> None:
        seen.append((inductor_config.max_autotune, inductor_config.epilogue_fusion))

    inductor_config.pre_grad_custom_pass = look
    torch.compile(causal, backend="flash_inductor", mode="max-autotune-no-cudagraphs")(*qkv)
    torch._dynamo.reset()
    torch.compile(causal, backend="flash_inductor", options={"epilogue_fusion": False})(*qkv)
    assert seen == [(True, True), (False, False)]


@pytest.mark.parametrize(
    "arguments,message", [({"mode": "fastest"}, "fastest"), ({"options": {"no_such_option": 1}}, "no_such_option")]
)
def test_a_bad_mode_or_option_is_named(qkv, arguments: dict, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        torch.compile(causal, backend="flash_inductor", **arguments)(*qkv)


def test_a_model_without_attention_is_left_alone() -> None:
    flash_inductor.enable()
    with collect() as sites:
        out = torch.compile(lambda x: x.sin() + 1)(torch.ones(3))
    assert sites == []
    torch.testing.assert_close(out, torch.ones(3).sin() + 1)
