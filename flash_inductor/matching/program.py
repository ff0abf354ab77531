"""A graph in program order: what a node's tensor holds at a given moment, in an IR that isn't functional.

After ``s.masked_fill_(m, -inf)`` the node ``s`` stands for something else than before, though no edge says so.
:meth:`Program.value` answers with the operation that really made the value, the in-place one if there was one.
"""

from __future__ import annotations

import math
import operator
import struct
from typing import Any

import torch
from torch import fx

from .._compat.dims import may_become_constant
from . import canonical, effects
from .canonical import Arg, Call
from .mask_domain import Value, known


class Refused(Exception):
    """An attention site that is left alone; the text is a sentence for the user, with the remedy if there is one."""


class Program:
    """Positions and writes of a graph.  Valid until the graph changes."""

    def __init__(self, graph: fx.Graph, before: Program | None = None) -> None:
        """``before``: the program before nodes were replaced, which saves looking again at nodes that don't write."""
        self.position = effects.order(graph)
        self.nodes = list(graph.nodes)
        self.quiet: set[fx.Node] = set() if before is None else before.quiet
        self.writes: list[tuple[int, fx.Node, fx.Node]] = []
        for writer, position in self.position.items():
            if writer in self.quiet:
                continue
            targets = effects.written(writer)
            self.writes += [(position, writer, target) for target in targets]
            if not targets:
                self.quiet.add(writer)
        self._storages: dict[fx.Node, frozenset[int]] = {}
        self.assumed: list[torch.SymFloat | torch.SymInt] = []
        # inputs that the op must not save; see bodies.fragile
        self.fragile: frozenset[fx.Node] = frozenset() if before is None else before.fragile
        # of masks, which layers share: what they were proved to mean by all that decides it, and their parts' values
        self.proofs: dict[Any, Any] = {} if before is None else before.proofs
        self.settled: dict[fx.Node, Value] = {} if before is None else before.settled

    def storages(self, node: fx.Node) -> frozenset[int]:
        """The memory of a node's tensors, as the fake tensors know it."""
        if node not in self._storages:
            self._storages[node] = frozenset(effects.storages(node))
        return self._storages[node]

    def overlap(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether two nodes may share memory; without metadata they may."""
        x, y = self.storages(a), self.storages(b)
        return a is b or bool(x & y) or not (x and y)

    def writes_between(self, node: fx.Node, start: int, end: int) -> list[tuple[fx.Node, fx.Node]]:
        """(writer, node it writes to) of all writes to the memory of ``node`` at positions start < p < end."""
        return [(w, t) for position, w, t in self.writes if start < position < end and self.overlap(t, node)]

    def value(self, node: Arg, at: fx.Node) -> Call | None:
        """The operation that made what ``node`` holds when ``at`` runs; its arguments are to be read at ``call.node``.

        None for a placeholder or an unknown operation, and where another view of the memory was written.
        """
        if not isinstance(node, fx.Node):
            return None
        writes = self.writes_between(node, self.position[node], self.position[at])
        if not writes:
            return canonical.call(node)
        writer, target = writes[-1]
        c = canonical.call(writer)
        whole = c is not None and c.op != "setitem" and "out" not in c.args and effects.same_view(target, node)
        return c if whole else None

    def assume(self, number: torch.SymFloat | torch.SymInt) -> float | None:
        """What a symbolic number is in this compilation.

        Under ``dynamic=True`` Dynamo makes a symbol of each Python float, a module's ``scaling`` too, and SDPA
        itself makes it a constant again.  So does :meth:`guard_assumed`, once it is sure that the site is replaced.
        """
        expr = number.node.expr
        if expr.is_number:
            return float(expr)
        # A SymInt here is a length, which must not become a constant.
        hint = number.node.hint if isinstance(number, torch.SymFloat) and number.node.has_hint() else None
        if hint is None:
            return None
        self.assumed.append(number)
        return float(hint)

    def assume_size(self, size: int | torch.SymInt) -> int | None:
        """What a size is in this compilation that kernels are made for, such as the head dim; None if that is open.

        Under ``dynamic=True`` Dynamo makes a symbol of it where query, key and value are arguments.
        """
        if isinstance(size, int) or size.node.expr.is_number:
            return int(size)
        if not may_become_constant(size):
            return None
        self.assumed.append(size)
        return int(size.node.hint)

    def guard_assumed(self) -> None:
        """Recompile if a number that was assumed changes."""
        for number in self.assumed:
            int(number) if isinstance(number, torch.SymInt) else float(number)

    def between(self, first: fx.Node, last: fx.Node) -> list[fx.Node]:
        return self.nodes[self.position[first] : self.position[last] + 1]


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for every run of the graph; puts no guard on them."""
    if a is b:
        return True
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return known(a == b)


def same_shape(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return (
        a is not None
        and b is not None
        and a.dim() == b.dim()
        and all(same_size(x, y) for x, y in zip(a.shape, b.shape, strict=True))
    )


def same_strides(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors of one shape have the same strides, where they matter."""
    return (
        a is not None
        and b is not None
        and all(same_size(x, y) or same_size(n, 1) for x, y, n in zip(a.stride(), b.stride(), a.shape, strict=True))
    )


_FUNCTIONS: dict[str, Any] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "neg": operator.neg,
    "abs": abs,
}


def constant(program: Program, node: Arg, at: fx.Node) -> float | None:
    """The number that a Python constant, or a one-element tensor made of constants, is; None if it isn't known."""
    plain = canonical.number(node)
    if plain is not None or not isinstance(node, fx.Node):
        return None if plain is None else float(plain)
    symbolic = canonical.value(node)
    if isinstance(symbolic, (torch.SymFloat, torch.SymInt)):
        return program.assume(symbolic)
    tensor = canonical.tensor(node)
    if tensor is None or tensor.dim() != 0 or tensor.requires_grad:
        return None
    c = program.value(node, at)
    if c is None:
        return None
    result: float | None = None
    if c.op in ("tensor", "scalar_tensor"):
        result = _plain(c.get("data", c.get("s")))
    elif c.op in ("full", "new_full", "full_like", "fill"):
        result = _plain(c.get("fill_value", c.get("value")))
    elif c.op in ("zeros", "new_zeros", "zeros_like", "ones", "new_ones", "ones_like"):
        result = 0.0 if "zeros" in c.op else 1.0
    elif c.op in ("cast", "clone", "contiguous", "detach"):
        result = constant(program, c.get("input"), c.node)
    elif c.op in _FUNCTIONS and set(c.args) <= {"input", "other", "exponent"}:
        operands = [
            constant(program, c.args[name], c.node) for name in ("input", "other", "exponent") if name in c.args
        ]
        if None not in operands:
            try:
                result = float(_FUNCTIONS[c.op](*operands))
            except (ArithmeticError, ValueError, TypeError):
                return None
    if result is None or not tensor.dtype.is_floating_point:
        return result
    return _rounded(result, tensor.dtype)


def _rounded(x: float, dtype: torch.dtype) -> float:
    """What a tensor of this dtype holds for x.  In plain Python: a fake mode may be active here."""
    if dtype is torch.float64 or not math.isfinite(x):
        return x
    if abs(x) > torch.finfo(dtype).max:
        return math.copysign(math.inf, x)
    if dtype is torch.float16:
        return float(struct.unpack("e", struct.pack("e", x))[0])
    bits = int(struct.unpack("I", struct.pack("f", x))[0])
    if dtype is torch.bfloat16:  # the upper half of a float32, to nearest even
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack("f", struct.pack("I", bits))[0])


def _plain(x: Arg) -> float | None:
    number = canonical.number(x)
    return None if number is None else float(number)
