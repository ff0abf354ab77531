"""Selective checkpoint policies: attention is saved or recomputed as the policy says, whatever name it uses for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flash_inductor
from flash_inductor._compat.checkpoint import save_as_sdpa
from flash_inductor.report import collect

from .model import causal, make_qkv, step

OURS = torch.ops.flashbwd.attn.default
SDPA = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
P = CheckpointPolicy


def region(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return causal(query.sin(), key.sin(), value).sin()


def saving(ops: list[Any], how: Any, otherwise: Any = P.PREFER_RECOMPUTE) -> Callable[..., Any]:
    return lambda context, op, *args, **kwargs: how if op in ops else otherwise


def runs_of_attention(contexts: Any) -> list[int]:
    """How often the op runs in the forward and in the backward graph; the step is compared with stock eager."""
    graphs: list[int] = []

    def inner(gm: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        graphs.append(sum(n.target is OURS for n in gm.graph.nodes))
        return compile_fx_inner(gm, example_inputs, **kwargs)

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return checkpoint(region, query, key, value, use_reentrant=False, context_fn=contexts)

    inputs = make_qkv()
    expected = step(region, inputs)
    with flash_inductor.enabled(), collect() as sites:
        got = step(torch.compile(function, backend=partial(compile_fx, inner_compile=inner)), inputs)
    assert [s.replaced for s in sites] == [True]
    torch.testing.assert_close(got, expected)
    return graphs


CASES: dict[str, tuple[Any, list[int]]] = {
    "our op is saved": (saving([OURS], P.MUST_SAVE), [1, 0]),
    "our op in a list": ([OURS], [1, 0]),
    "our op is recomputed": (saving([OURS], P.MUST_RECOMPUTE), [1, 1]),
    "ATen's ops are saved": (saving(SDPA, P.MUST_SAVE), [1, 0]),
    "ATen's ops in a list": (SDPA, [1, 0]),
    "ATen's ops are better saved": (saving(SDPA, P.PREFER_SAVE, P.MUST_RECOMPUTE), [1, 0]),
    "ATen's ops by a bool": (saving(SDPA, True, False), [1, 0]),
    "neither is named": (saving([torch.ops.aten.mm.default], P.MUST_SAVE), [1, 1]),
}


@pytest.mark.parametrize("name", CASES)
def test_policies(name: str) -> None:
    policy, expected = CASES[name]
    assert runs_of_attention(partial(create_selective_checkpoint_contexts, policy)) == expected


def test_a_policy_that_counts_sees_each_other_op_once() -> None:
    seen: list[Any] = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(op)
        return P.PREFER_RECOMPUTE

    runs_of_attention(partial(create_selective_checkpoint_contexts, policy))
    calls_while_tracing = seen.count(OURS)
    assert calls_while_tracing and seen.count(torch.ops.aten.sin.default) == 3 * calls_while_tracing


def test_contexts_of_another_kind_and_bodies_without_stay_as_they_are() -> None:
    body = torch.fx.symbolic_trace(torch.nn.Identity())
    save_as_sdpa(body, OURS)
    assert "_checkpoint_context_fn" not in body.meta
    contexts = (torch.no_grad(), torch.no_grad())
    body.meta["_checkpoint_context_fn"] = lambda: contexts
    save_as_sdpa(body, OURS)
    before = copy.copy(vars(contexts[0]))
    assert body.meta["_checkpoint_context_fn"]() is contexts and vars(contexts[0]) == before


def test_the_users_key_for_the_cache_is_kept_and_changed() -> None:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts(SDPA)

    body = torch.fx.symbolic_trace(torch.nn.Identity())
    contexts.cache_hash = "mine"  # type: ignore[attr-defined]
    body.meta["_checkpoint_context_fn"] = contexts
    save_as_sdpa(body, OURS)
    wrapped = body.meta["_checkpoint_context_fn"]
    assert "mine" in wrapped.cache_hash and wrapped.cache_hash != "mine"
    save_as_sdpa(body, OURS)
    assert body.meta["_checkpoint_context_fn"] is wrapped


def test_eager_policies_name_the_op() -> None:
    """In eager code nothing is replaced: an explicit call is saved under its own name."""
    calls: list[Any] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flash_inductor.attention(query.sin(), key.sin(), value, is_causal=True).sin()

    inputs = make_qkv()
    expected = step(region, inputs)
    for ops, runs in (([OURS], 1), ([torch.ops.aten.sin.default], 2)):
        calls.clear()
        contexts = partial(create_selective_checkpoint_contexts, ops)
        with Count():
            got = step(lambda *x, c=contexts: checkpoint(function, *x, use_reentrant=False, context_fn=c), inputs)
        torch.testing.assert_close(got, expected)
        assert calls.count(OURS) == runs
