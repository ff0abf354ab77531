"""``F.multi_head_attention_forward`` is one node with the projections inside.  It is opened to get at the attention.

What is emitted is what torch computes, with SDPA in the middle, which is then a site like any other.  The node itself
stays until that site is replaced, so a refusal leaves the graph as it was.
"""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from . import canonical, safety
from .canonical import tensor
from .emitter import Emitter
from .program import Program, Refused, constant

aten = torch.ops.aten
FORM = "multi_head_attention_forward"
_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def is_call(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is F.multi_head_attention_forward


def masks(node: fx.Node) -> list[Any]:
    """The arguments of a call that are masks, or None."""
    return [_arguments(node)[name] for name in ("attn_mask", "key_padding_mask")]


@dataclass
class Opened:
    """The nodes put in front of a call: the attention and, computed from it, what the call returns.

    ``first_of_several``: the call returns a tuple, and ``result`` is what is first in it.
    """

    node: fx.Node
    sdpa: fx.Node
    result: fx.Node
    emitter: Emitter
    first_of_several: bool = True

    def close(self) -> None:
        self.emitter.undo()

    def commit(self) -> None:
        """Use the opened form instead of the call."""
        if not self.first_of_several:
            self.node.replace_all_uses_with(self.result)
        for user in list(self.node.users):
            user.replace_all_uses_with(self.result)
            self.node.graph.erase_node(user)
        self.node.graph.erase_node(self.node)


def open_call(program: Program, node: fx.Node) -> Opened:
    """Emit the projections, SDPA and the output projection of a call.  Raises Refused, the graph as it was."""
    args = _arguments(node)
    outputs = canonical.value(node)
    if not isinstance(outputs, (tuple, list)) or not isinstance(outputs[0], torch.Tensor):
        raise Refused(f"the shapes of {FORM} are not known; compile with dynamic=False")
    _check_users(node)
    for name in ("bias_k", "bias_v", "static_k", "static_v"):
        if args[name] is not None:
            raise Refused(
                f"the attention has {name}, which the op can't do; leave it out; the plugin can't help otherwise"
            )
    if args["add_zero_attn"]:
        raise Refused(
            "the attention has add_zero_attn=True, which the op can't do; "
            "leave add_zero_attn out; the plugin can't help otherwise"
        )
    if args["use_separate_proj_weight"] not in (True, False) or args["is_causal"] not in (True, False):
        raise Refused(f"the arguments of {FORM} aren't constants; use Python numbers and bools")
    for role in ("query", "key", "value"):
        if safety.check_tensor(args[role], role).dim() not in (2, 3):
            raise Refused(
                f"the {role} of {FORM} has neither two nor three dims; "
                "pass [length, batch, embedding], or [batch, length, embedding] with batch_first=True"
            )
    dropout = constant(program, args["dropout_p"], node) if args["training"] else 0.0
    if dropout is None:
        raise Refused("the dropout probability isn't a constant; use a Python number")
    heads = args["num_heads"]
    if not isinstance(heads, int) or not isinstance(outputs[0].shape[-1], int):
        raise Refused(
            "the number of heads and the embedding dim must be constants; mark only batch and length as dynamic"
        )
    emitter = Emitter(node, args["query"])
    try:
        return _Opening(node, args, emitter, heads, dropout).run(outputs[0])
    except Exception:
        emitter.undo()
        raise


def _arguments(node: fx.Node) -> dict[str, Any]:
    bound = _SIGNATURE.bind(*node.args, **node.kwargs)  # Dynamo has run it with these arguments
    bound.apply_defaults()
    return bound.arguments


def _check_users(node: fx.Node) -> None:
    for user in node.users:
        index = user.args[1] if user.op == "call_function" and user.target is operator.getitem else None
        if index not in (0, 1) or (index == 1 and user.users):
            raise Refused("the attention weights are used; pass need_weights=False and don't use them")


class _Opening:
    def __init__(self, node: fx.Node, args: dict[str, Any], emitter: Emitter, heads: int, dropout: float) -> None:
        self.node, self.args, self.e, self.heads, self.dropout = node, args, emitter, heads, dropout
        self.autocast: tuple[str, torch.dtype] | None = None

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.e.call(target, *args, autocast=self.autocast, **kwargs)

    def run(self, output: torch.Tensor) -> Opened:
        args = self.args
        used = [args[x] for x in ("query", "key", "value", "in_proj_weight", "q_proj_weight", "out_proj_weight")]
        if any(t.dtype is not output.dtype for x in used if (t := tensor(x)) is not None):
            self.autocast = (output.device.type, output.dtype)  # nothing else gives a result of another dtype
        unbatched = output.dim() == 2
        query, key, value = self._projected([self._batched(args[x], unbatched) for x in ("query", "key", "value")])
        mask, causal = self._mask(unbatched)
        sdpa = self.call(
            F.scaled_dot_product_attention,
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout,
            is_causal=causal,
        )
        merged = self.call(aten.flatten.using_ints, self.call(aten.permute.default, sdpa, [2, 0, 1, 3]), 2, 3)
        result = self.call(F.linear, merged, args["out_proj_weight"], args["out_proj_bias"])
        if unbatched:
            result = self.call(aten.squeeze.dim, result, 1)
        new = tensor(result)
        assert new is not None  # emitted with its value
        if new.shape != output.shape or new.dtype is not output.dtype:
            raise Refused(
                f"{FORM} gives {output.dtype} {list(output.shape)}, which could not be kept; "
                "compile with dynamic=False, or pass dense query, key and value of one dtype"
            )
        return Opened(self.node, sdpa, result, self.e)

    def _batched(self, node: fx.Node, unbatched: bool) -> fx.Node:
        return node if not unbatched else self.call(aten.unsqueeze.default, node, 1)

    def _projected(self, sources: list[fx.Node]) -> list[fx.Node]:
        """Query, key and value [batch, heads, length, head dim], as views of as few products as can be."""
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        bias = self.args["in_proj_bias"]
        if self.args["use_separate_proj_weight"]:
            return [
                self._split_heads(self._linear(source, self.args[name], self._rows(bias, i, i + 1)), 1)[0]
                for i, (source, name) in enumerate(zip(sources, names, strict=True))
            ]
        weight = self.args["in_proj_weight"]
        originals = [self.args[x] for x in ("query", "key", "value")]
        projected: list[fx.Node] = []
        while len(projected) < 3:
            start = end = len(projected)
            while end < 3 and originals[end] is originals[start]:
                end += 1
            product = self._linear(sources[start], self._rows(weight, start, end), self._rows(bias, start, end))
            projected += self._split_heads(product, end - start)
        return projected

    def _linear(self, x: fx.Node, weight: fx.Node | None, bias: fx.Node | None) -> fx.Node:
        return self.call(F.linear, x, weight, bias)

    def _rows(self, packed: fx.Node | None, start: int, end: int) -> fx.Node | None:
        """The part for the inputs ``start`` to ``end`` of a weight or bias that three share."""
        if packed is None or (start, end) == (0, 3):
            return packed
        rows = tensor(packed).shape[0] // 3  # type: ignore[union-attr]
        return self.call(aten.slice.Tensor, packed, 0, rows * start, rows * end)

    def _split_heads(self, product: fx.Node, parts: int) -> list[fx.Node]:
        """[length, batch, parts * embedding] -> for each part [batch, heads, length, head dim]."""
        opened = self.call(aten.unflatten.int, product, -1, [parts, self.heads, -1])
        opened = self.call(aten.permute.default, opened, [2, 1, 3, 0, 4])
        return [self.call(aten.select.int, opened, 0, part) for part in range(parts)]

    def _mask(self, unbatched: bool) -> tuple[fx.Node | None, bool]:
        """SDPA's mask and causal flag.  Here a True in a bool mask hides, in SDPA's it shows."""
        mask, padding, causal = (self.args[x] for x in ("attn_mask", "key_padding_mask", "is_causal"))
        if causal and mask is None:
            raise Refused("is_causal=True needs attn_mask, torch raises an error here; pass attn_mask too")
        if causal and padding is None and not self.args["need_weights"]:
            return None, True  # torch takes the hint for the mask
        hidden: list[fx.Node] = []
        if mask is not None:
            if tensor(mask) is None:
                raise Refused("attn_mask is not a tensor; pass a bool or float tensor, or None")
            if tensor(mask).dim() == 3:  # type: ignore[union-attr]
                mask = self.call(aten.unflatten.int, mask, 0, [-1, self.heads])
            hidden.append(mask)
        if padding is not None:
            if tensor(padding) is None:
                raise Refused("key_padding_mask is not a tensor; pass a bool or float tensor, or None")
            for _ in range(3 if unbatched else 2):
                padding = self.call(aten.unsqueeze.default, padding, 0 if unbatched else 1)
            hidden.append(padding)
        if not hidden:
            return None, False
        dtypes = [tensor(x).dtype for x in hidden]  # type: ignore[union-attr]
        if all(d is torch.bool for d in dtypes):
            masked = hidden[0] if len(hidden) == 1 else self.call(torch.logical_or, *hidden)
            return self.call(torch.logical_not, masked), False
        query = tensor(self.args["query"])
        assert query is not None  # checked at the beginning
        added = [self._additive(x, query.dtype) for x in hidden]
        return (added[0] if len(added) == 1 else self.call(torch.add, *added)), False

    def _additive(self, mask: fx.Node, dtype: torch.dtype) -> fx.Node:
        value = tensor(mask)
        assert value is not None  # checked by the caller
        if value.dtype is not torch.bool:
            return mask
        zeros = self.call(torch.zeros_like, mask, dtype=dtype)
        return self.call(torch.masked_fill, zeros, mask, float("-inf"))
