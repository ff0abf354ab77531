"""Adds nodes with fake values to a graph, and takes them back."""

from __future__ import annotations

import operator
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ..ops.library import attn, attn_fake
from . import canonical
from .canonical import tensor, value
from .plan import Input
from .products import Label
from .program import Refused

aten = torch.ops.aten
_COPIED_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")


class Emitter:
    """Adds nodes before ``at``; :meth:`undo` takes all of them back."""

    def __init__(self, at: fx.Node, source: fx.Node) -> None:
        self.at = at
        self.graph = at.graph
        self.key = "example_value" if "example_value" in at.meta else "val"
        self.meta = {k: at.meta[k] for k in _COPIED_META if k in at.meta}
        # the mode that made the values: Dynamo's own, which isn't the one that detect_fake_mode() answers
        self.source = tensor(source)
        self.mode = getattr(self.source, "fake_mode", None)
        self.device = canonical.value(source).device.type
        self.nodes: list[fx.Node] = []

    def call(self, target: Any, *args: Any, autocast: tuple[str, torch.dtype] | None = None, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.at):
            node = self.graph.call_function(target, args, kwargs)
        self.nodes.append(node)
        node.meta.update(self.meta)
        values, named = fx.map_arg((args, kwargs), value)
        with ExitStack() as stack:
            if self.mode is not None:
                stack.enter_context(self.mode)
            stack.enter_context(torch.no_grad())
            stack.enter_context(
                torch.autocast(self.device, autocast[1]) if autocast else torch.autocast(self.device, enabled=False)
            )
            node.meta[self.key] = self._compute(target, autocast is not None)(*values, **named)
        return node

    def _compute(self, target: Any, autocast: bool) -> Any:
        """What gives a node's fake value: for our op its fake itself, where the dispatcher only adds time."""
        plain = type(self.source) is FakeTensor and not autocast
        return attn_fake if target is attn and plain else target

    def undo(self) -> None:
        for node in reversed(self.nodes):
            self.graph.erase_node(node)
        self.nodes.clear()

    def size(self, source: Input, label: Label) -> Any:
        """A size as an argument: a number, or a node that computes it."""
        size = source.size(label)
        if isinstance(size, int):
            return size
        return self.call(aten.sym_size.int, source.node, source.labels.index(label))

    def symbol(self, size: Any) -> Any:
        """A SymInt expression as an argument: computed from sizes that the graph has."""
        if size is None or isinstance(size, (int, float)):
            return size
        import sympy

        def build(expr: Any) -> Any:
            if expr.is_Integer:
                return int(expr)
            if expr.is_Symbol:
                return self._of_symbol(expr)
            fn = operator.add if isinstance(expr, sympy.Add) else operator.mul if isinstance(expr, sympy.Mul) else None
            if fn is None:
                raise Refused(
                    f"the mask's bound {size} can't be computed in the graph; "
                    "compile with dynamic=False, or make the mask from sizes of query and key"
                )
            parts = [build(a) for a in expr.args]
            total = parts[0]
            for part in parts[1:]:
                both = isinstance(total, int) and isinstance(part, int)
                total = fn(total, part) if both else self.call(fn, total, part)
            return total

        return build(size.node.expr)

    def _of_symbol(self, symbol: Any) -> fx.Node:
        for node in self.graph.nodes:
            if node is self.at:
                break
            known = value(node)
            if isinstance(known, torch.SymInt) and known.node.expr == symbol:
                return node
            if isinstance(known, torch.Tensor) and node.op in ("placeholder", "get_attr"):
                for dim, size in enumerate(known.shape):
                    if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                        return self.call(aten.sym_size.int, node, dim)
        raise Refused(
            f"the size {symbol} isn't computed in this graph; "
            "compile with dynamic=False, or make the mask from sizes of query and key"
        )
