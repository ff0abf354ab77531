"""Runs the part of a graph that makes a mask on abstract values, in program order, in-place writes included."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from . import canonical, effects, mask_sums
from .canonical import Arg, Call
from .mask_domain import (
    Affine,
    Linear,
    Shape,
    Top,
    TwoValued,
    Unknown,
    Value,
    broadcast,
    constant,
    constant_of,
    drop_unit_dims,
    simplify,
)
from .mask_ops import EXACT_DTYPES, VALUE_HANDLERS, arg_shape_of, dtype_of, shape_of
from .mask_reads import Sum, is_loose, opaque
from .mask_shapes import SHAPE_HANDLERS

_HANDLERS = {**VALUE_HANDLERS, **SHAPE_HANDLERS}
# arguments that don't change values (dtype and device are read from the result's metadata)
_HARMLESS = frozenset(
    [
        "dtype",
        "device",
        "layout",
        "pin_memory",
        "requires_grad",
        "memory_format",
        "non_blocking",
        "copy",
        "start",
        "end",
        "step",
    ]
)
# larger coefficients and constants could leave the range in which float32 and int32 are exact
_MAX_COEF, _MAX_CONST = 1 << 6, 1 << 23


class Interpreter:
    """Abstract values of the nodes that decide ``node`` when ``at`` runs.

    ``leaf`` gives the value of a placeholder or get_attr (a buffer that may be read), or None for an unknown one.
    With ``reads``, what isn't known otherwise is a value that is read from the graph (mask_reads.py) instead of Top.
    ``without_grad``: nodes that run while gradients are off.
    ``settled``: values of nodes that nothing writes to, found before; what is found here is added.
    """

    def __init__(
        self,
        leaf: Callable[[fx.Node], Value | None],
        *,
        reads: bool = False,
        without_grad: frozenset[fx.Node] = frozenset(),
        settled: dict[fx.Node, Value] | None = None,
    ) -> None:
        self.leaf = leaf
        self.reads = reads
        self.without_grad = without_grad
        self.settled = settled
        self.values: dict[fx.Node, Value] = {}

    def run(self, node: fx.Node, at: fx.Node) -> Value:
        nodes = effects.closure(node, at)
        written_to = [effects.written(current) for current in nodes]
        settled = None if any(written_to) else self.settled
        for current, targets in zip(nodes, written_to, strict=True):
            if settled is not None and current in settled:
                self.values[current] = settled[current]
                continue
            if canonical.tensor(current) is None and not targets:
                continue
            value: Value
            try:
                value = self._checked(current, self._evaluate(current))
            except Unknown as reason:
                value = Top(str(reason))
            except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
                # arguments of a form the handlers don't expect must not break the compilation
                value = Top(f"the mask is made with `{_target(current)}` in a way that isn't understood ({error})")
            if self.reads and is_loose(value):
                value = Top("too little is known of the mask's numbers")
            written = value if len(targets) == 1 else Top(f"`{_target(current)}` writes to the mask")
            if self.reads and isinstance(value, Top):
                value = mask_sums.unknown_value(self, current)
            if canonical.tensor(current) is not None:
                self.values[current] = value
                # what is read from a buffer is looked at each time, so that the proof names the buffer
                if settled is not None and current.op not in ("placeholder", "get_attr"):
                    settled[current] = value
            for target in targets:
                self._write(target, written, current)
        return self.values.get(node, Top(f"`{node.name}` isn't a tensor whose shape is known"))

    def _checked(self, node: fx.Node, value: Value) -> Value:
        result = effects.result(node)
        if self.cuts_gradient(result, value):
            raise Unknown(f"`{node.name}` cuts the gradient of a bias")
        if isinstance(value, Affine):
            if dtype_of(result) not in EXACT_DTYPES:
                raise Unknown(
                    f"`{node.name}` holds an index as {dtype_of(result)}, which can't hold every index exactly"
                )
            const = value.linear.const
            if any(abs(c) > _MAX_COEF for c in value.linear.coefs) or (
                isinstance(const, int) and abs(const) > _MAX_CONST
            ):
                raise Unknown(f"`{node.name}` holds indices that are too large to be exact in every dtype")
        return drop_unit_dims(value, shape_of(result))

    def _write(self, target: fx.Node, value: Value, writer: fx.Node) -> None:
        """The tensor of ``target`` now holds ``value``; views of it hold something we don't follow."""
        stale = Top(f"`{target.name}` has views and is written to in place; build the mask without views of it")
        for alias in effects.aliases(target):
            if alias in self.values:
                now = value if effects.same_view(alias, target) else stale
                self.values[alias] = opaque(alias, writer) if self.reads and isinstance(now, Top) else now

    def cuts_gradient(self, node: fx.Node, value: Value) -> bool:
        """Whether the gradient ends at ``node`` (detach, no_grad), so that what lies under it must not be used."""
        if not isinstance(value, Sum) or not value.needs_grad():
            return False
        tensor = canonical.tensor(node)
        return tensor is None or not tensor.requires_grad or node in self.without_grad

    def _evaluate(self, node: fx.Node) -> Value:
        if node.op in ("placeholder", "get_attr"):
            value = self.leaf(node)
            return value if value is not None else Top(_leaf_reason(node))
        c = canonical.call(node)
        handler = None if c is None else _HANDLERS.get(c.op)
        if c is None or handler is None:
            raise Unknown(f"the mask is made with `{_target(node)}`, which the mask prover doesn't know")
        self.check_arguments(c)
        return handler(self, c)

    def check_arguments(self, c: Call) -> None:
        """Raise Unknown if an argument may change what the operation means."""
        allowed = {p.lstrip("*") for p in canonical.PARAMS[c.op]} | _HARMLESS
        extra = [name for name, arg in c.args.items() if name not in allowed and arg is not None]
        if extra and c.op != "cast":
            raise Unknown(f"the mask is made with `{_target(c.node)}` and its argument `{extra[0]}`")

    def value(self, arg: Arg) -> Value:
        """The abstract value of an argument: a tensor, or a number (rank 0).  Raises Unknown with its reason."""
        if isinstance(arg, fx.Node) and canonical.tensor(arg) is not None:
            value = self.values[arg]
            if isinstance(value, Top):
                raise Unknown(value.reason)
            return value
        scalar = canonical.value(arg)
        if isinstance(scalar, torch.SymInt):
            return Affine(Linear((), simplify(scalar)))
        if isinstance(scalar, (bool, int, float)):
            return constant(scalar)
        raise Unknown(f"the mask is made with `{arg}`, which isn't a known number")

    def fitted(self, arg: Arg, shape: Shape) -> Value:
        """An operand broadcast to the shape of a result."""
        return broadcast(self.value(arg), arg_shape_of(arg), shape)

    def two_valued(self, arg: Arg, shape: Shape) -> TwoValued:
        """As `fitted`, where only a two-valued operand will do."""
        value = self.fitted(arg, shape)
        number = constant_of(value)
        if number is not None:
            return constant(number)
        if not isinstance(value, TwoValued):
            raise Unknown("the mask does arithmetic on indices that isn't understood")
        return value


def _target(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _leaf_reason(node: fx.Node) -> str:
    kind = "graph input" if node.op == "placeholder" else "attribute"
    return (
        f"the mask depends on the {kind} `{node.target}`; build it inside the compiled function from arange or tril, "
        "or pass is_causal=True"
    )
