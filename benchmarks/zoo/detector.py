"""Finds attention in a graph of torch IR without any of the package's code: what coverage is measured against.

A site is one softmax(Q K^T) V.  It walks back from each softmax to a product of two activations and on to a product
with a value; calls of SDPA, FlexAttention and torch's fused modules count as they are.  It looks generously: it need
not prove what the attention means.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm", "__matmul__", "mm", "dot"}
# fmt: off
LAYOUT = {
    "transpose", "permute", "view", "reshape", "contiguous", "expand", "getitem", "chunk", "split", "unbind",
    "unsqueeze", "squeeze", "flatten", "unflatten", "repeat_interleave", "repeat", "to", "float", "type_as", "half",
    "bfloat16", "swapaxes", "movedim", "expand_as", "view_as", "tensor_split", "t", "T", "mT", "clone", "narrow",
    "rearrange", "transpose_", "getattr",
}
POINTWISE = {
    "mul", "imul", "mul_", "div", "truediv", "itruediv", "div_", "add", "iadd", "add_", "sub", "where", "masked_fill",
    "masked_fill_", "tanh", "clamp", "clamp_min", "cat", "neg", "softmax", "dropout", "nan_to_num", "max", "amax",
    "maximum", "minimum", "type", "detach", "slice", "sub_", "isub", "setitem", "dropout_", "floordiv", "__truediv__",
    "alpha_dropout", "baddbmm",
}
# fmt: on
FUSED = {"multi_head_attention_forward", "_transformer_encoder_layer_fwd", "_native_multi_head_attention"}
BACK, FORWARD = 14, 12  # how far a product may be from the softmax


@dataclass(frozen=True)
class Detected:
    """One attention site: the node of the call, or of the softmax, and its chain in words."""

    node: fx.Node
    form: str
    chain: str


def name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    if node.op == "call_function":
        if node.target in (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention):
            return "sdpa"
        if "flex_attention" in str(node.target):
            return "flex_attention"
        return getattr(node.target, "__name__", str(node.target))
    return node.op


def value(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def tensors(node: fx.Node) -> list[fx.Node]:
    """Arguments that are tensors, with repetitions, in order."""
    found: list[fx.Node] = []

    def visit(argument: Any) -> None:
        if isinstance(argument, fx.Node):
            if isinstance(value(argument), torch.Tensor | tuple | list) or value(argument) is None:
                found.append(argument)
        elif isinstance(argument, list | tuple):
            for item in argument:
                visit(item)
        elif isinstance(argument, dict):
            visit(list(argument.values()))

    visit(node.args)
    visit(node.kwargs)
    return found


def is_softmax(node: fx.Node) -> bool:
    return name(node) in ("softmax", "_softmax")


def _is_parameter(node: fx.Node) -> bool:
    return node.op == "placeholder" and "_parameters_" in str(node.target) and "_buffers_" not in str(node.target)


def is_product(node: fx.Node) -> bool:
    """Whether a node multiplies two activations; a product with a weight is a projection, not a score."""
    return (
        name(node) in PRODUCTS
        and len(tensors(node)) >= 2
        and not any(_is_parameter(x) for x in node.all_input_nodes[:3])
    )


def distance_to_product(node: fx.Node) -> int | None:
    """Steps back to the nearest product through layout and pointwise ops."""
    queue, seen = deque([(node, 0)]), set()
    while queue:
        here, steps = queue.popleft()
        if here in seen or steps > BACK:
            continue
        seen.add(here)
        if is_product(here):
            return steps
        if here.op != "placeholder" and (name(here) in POINTWISE or name(here) in LAYOUT):
            queue.extend((x, steps + 1) for x in tensors(here))
    return None


def path_to_value_product(softmax: fx.Node) -> list[fx.Node] | None:
    """The nodes after a softmax up to the product with the value, inclusive."""
    queue: deque[tuple[fx.Node, list[fx.Node]]] = deque([(softmax, [])])
    seen = set()
    while queue:
        here, path = queue.popleft()
        if here in seen or len(path) > FORWARD:
            continue
        seen.add(here)
        for user in here.users:
            if name(user) in PRODUCTS:
                return [*path, user]
            if name(user) in POINTWISE or name(user) in LAYOUT:
                queue.append((user, [*path, user]))
    return None


def _from_softmax(softmax: fx.Node) -> Detected | None:
    after = path_to_value_product(softmax)
    if after is None or not tensors(softmax):
        return None
    before: list[fx.Node] = []
    here = tensors(softmax)[0]
    if distance_to_product(here) is None:
        return None
    while not (name(here) in PRODUCTS and len(tensors(here)) >= 2):
        near = [(steps, i, x) for i, x in enumerate(tensors(here)) if (steps := distance_to_product(x)) is not None]
        if not near or len(before) > 40:
            return None
        before.append(here)
        here = min(near)[2]
    chain = [here, *reversed(before), softmax, *after]
    return Detected(softmax, "softmax chain", " -> ".join(map(name, chain)))


def sites_of(graph: fx.Graph) -> list[Detected]:
    """Every attention site of one graph."""
    found = []
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        if name(node) in FUSED or name(node) in ("sdpa", "flex_attention"):
            found.append(Detected(node, name(node), name(node)))
        elif is_softmax(node) and (site := _from_softmax(node)) is not None:
            found.append(site)
    return found


def sites_of_module(module: fx.GraphModule) -> list[Detected]:
    """Every attention site of a graph and of the bodies of its higher-order ops (checkpoint, ...)."""
    graphs = [x for x in module.modules() if isinstance(x, fx.GraphModule)]
    return [site for x in graphs for site in sites_of(x.graph)]
