"""Selective checkpoint policies (torch.utils.checkpoint.create_selective_checkpoint_contexts) and rewritten bodies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

_CONTEXTS = "_checkpoint_context_fn"  # where Dynamo keeps the user's context_fn, in the meta of the body
_SDPA = [
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(torch.ops.aten, name)
]


def save_as_sdpa(body: torch.fx.GraphModule | None, ours: Any) -> None:
    """Let a policy that saves ATen's fused attention save the op that has taken its place in a checkpointed body."""
    context_fn = body.meta.get(_CONTEXTS) if body is not None else None
    if body is not None and context_fn is not None and not isinstance(context_fn, _Contexts):
        body.meta[_CONTEXTS] = _Contexts(context_fn, ours)


class _Contexts:
    """A user's context_fn with the policy of its contexts extended; contexts of another kind stay as they are."""

    def __init__(self, context_fn: Callable[[], Any], ours: Any) -> None:
        self.context_fn = context_fn
        self.ours = ours
        if hasattr(context_fn, "cache_hash"):  # without it AOTAutograd doesn't cache
            self.cache_hash = f"flash_inductor {context_fn.cache_hash}"

    def __call__(self) -> Any:
        contexts = self.context_fn()
        for context in contexts:
            policy = getattr(context, "policy_fn", None)
            if policy is not None:
                context.policy_fn = partial(_policy, policy, self.ours)
        return contexts


def _policy(policy: Callable[..., Any], ours: Any, context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    answer = policy(context, op, *args, **kwargs)
    if op is ours and not _saves(answer):
        others = (policy(context, sdpa, *args, **kwargs) for sdpa in _SDPA)
        answer = next((other for other in others if _saves(other)), answer)
    return answer


def _saves(answer: Any) -> bool:
    return answer is True or answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
