"""One view of the many spellings of an operation in a captured graph.

``F.softmax(x, -1)``, ``torch.softmax(x, dim=-1)``, ``x.softmax(-1)`` and ``aten.softmax.int(x, -1)`` (what
torch.export leaves) all become ``Call("softmax", {"input": x, "dim": -1})``.  Functions are known by identity,
never by name alone, so a user's own ``softmax`` is not mistaken for torch's.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

Arg = Any  # fx.Node or a constant


@dataclass(frozen=True)
class Call:
    """One node under its canonical name, arguments by name (only those given), ``inplace`` if it writes its input."""

    op: str
    args: dict[str, Arg]
    node: fx.Node
    inplace: bool = False

    def get(self, name: str, default: Arg = None) -> Arg:
        return self.args.get(name, default)

    def __getitem__(self, name: str) -> Arg:
        return self.args[name]


# canonical name -> parameter names, in positional order, of the function form; "*x" takes the rest, which may also
# come as one list.  Methods have the same order, self first, unless METHOD_PARAMS says otherwise.
PARAMS: dict[str, tuple[str, ...]] = {
    # products
    "matmul": ("input", "other"),
    "bmm": ("input", "other"),
    "baddbmm": ("input", "batch1", "batch2", "beta", "alpha"),
    "einsum": ("equation", "*operands"),
    # pointwise
    "add": ("input", "other"),
    "sub": ("input", "other"),
    "rsub": ("input", "other"),
    "mul": ("input", "other"),
    "div": ("input", "other"),
    "floordiv": ("input", "other"),
    "mod": ("input", "other"),
    "pow": ("input", "exponent"),
    "sqrt": ("input",),
    "rsqrt": ("input",),
    "neg": ("input",),
    "abs": ("input",),
    "tanh": ("input",),
    "clamp": ("input", "min", "max"),
    "maximum": ("input", "other"),
    "minimum": ("input", "other"),
    "where": ("condition", "input", "other"),
    "masked_fill": ("input", "mask", "value"),
    "le": ("input", "other"),
    "lt": ("input", "other"),
    "ge": ("input", "other"),
    "gt": ("input", "other"),
    "eq": ("input", "other"),
    "ne": ("input", "other"),
    "bitwise_and": ("input", "other"),
    "bitwise_or": ("input", "other"),
    "bitwise_xor": ("input", "other"),
    "bitwise_not": ("input",),
    "logical_and": ("input", "other"),
    "logical_or": ("input", "other"),
    "logical_not": ("input",),
    # reductions and normalisers
    "softmax": ("input", "dim", "dtype"),
    "dropout": ("input", "p", "training", "inplace"),
    "cumsum": ("input", "dim"),
    "diff": ("input", "n", "dim", "prepend", "append"),
    "max": ("input", "dim", "keepdim"),
    "amax": ("input", "dim", "keepdim"),
    "sum": ("input", "dim", "keepdim"),
    # layout
    "transpose": ("input", "dim0", "dim1"),
    "permute": ("input", "*dims"),
    "t": ("input",),
    "mT": ("input",),
    "numpy_T": ("input",),
    "movedim": ("input", "source", "destination"),
    "view": ("input", "*shape"),
    "reshape": ("input", "*shape"),
    "flatten": ("input", "start_dim", "end_dim"),
    "unflatten": ("input", "dim", "sizes"),
    "expand": ("input", "*sizes"),
    "expand_as": ("input", "other"),
    "view_as": ("input", "other"),
    "broadcast_to": ("input", "size"),
    "repeat": ("input", "*repeats"),
    "repeat_interleave": ("input", "repeats", "dim", "output_size"),
    "unsqueeze": ("input", "dim"),
    "squeeze": ("input", "*dim"),
    "getitem": ("input", "index"),
    "setitem": ("input", "index", "value"),
    "select": ("input", "dim", "index"),
    "slice": ("input", "dim", "start", "end", "step"),
    "narrow": ("input", "dim", "start", "length"),
    "index_select": ("input", "dim", "index"),
    "gather": ("input", "dim", "index"),
    "index": ("input", "indices"),
    "chunk": ("input", "chunks", "dim"),
    "split": ("input", "split_size", "dim"),
    "unbind": ("input", "dim"),
    "cat": ("tensors", "dim"),
    "stack": ("tensors", "dim"),
    "contiguous": ("input",),
    "clone": ("input",),
    "detach": ("input",),
    "copy": ("input", "src"),
    "cast": ("input",),  # .to(...), .float(), .type_as(...): the result's dtype and device are in the metadata
    # creation
    "arange": ("*bounds",),
    "full": ("size", "fill_value"),
    "new_full": ("input", "size", "fill_value"),
    "full_like": ("input", "fill_value"),
    "ones": ("*size",),
    "zeros": ("*size",),
    "empty": ("*size",),
    "eye": ("n", "m"),
    "new_ones": ("input", "*size"),
    "new_zeros": ("input", "*size"),
    "new_empty": ("input", "*size"),
    "new_tensor": ("input", "data"),
    "ones_like": ("input",),
    "zeros_like": ("input",),
    "empty_like": ("input",),
    "fill": ("input", "value"),
    "zero": ("input",),
    "tensor": ("data",),
    "scalar_tensor": ("data",),
    "tril": ("input", "diagonal"),
    "triu": ("input", "diagonal"),
    "outer": ("input", "vec2"),
    # metadata
    "size": ("input", "dim"),
    "dim": ("input",),
    "getattr": ("input", "name"),
    # attention
    "sdpa": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
}

METHOD_PARAMS: dict[str, tuple[str, ...]] = {
    "where": ("input", "condition", "other"),
}
# Spellings whose positional order differs from PARAMS.
FUNCTION_PARAMS: dict[Any, tuple[str, ...]] = {
    F.softmax: ("input", "dim", "_stacklevel", "dtype"),
}

# other names of the same operation
ALIASES: dict[str, str] = {
    "__matmul__": "matmul",
    "imatmul": "matmul",
    "truediv": "div",
    "__truediv__": "div",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "floor_divide": "floordiv",
    "__floordiv__": "floordiv",
    "remainder": "mod",
    "__add__": "add",
    "__radd__": "add",
    "__mul__": "mul",
    "__rmul__": "mul",
    "__sub__": "sub",
    "__rsub__": "rsub",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "__invert__": "bitwise_not",
    "and_": "bitwise_and",
    "or_": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "inv": "bitwise_not",
    "less_equal": "le",
    "less": "lt",
    "greater_equal": "ge",
    "greater": "gt",
    "not_equal": "ne",
    "__le__": "le",
    "__lt__": "lt",
    "__ge__": "ge",
    "__gt__": "gt",
    "__eq__": "eq",
    "__ne__": "ne",
    "__getitem__": "getitem",
    "__setitem__": "setitem",
    "_softmax": "softmax",
    "_safe_softmax": "softmax",
    "special_softmax": "softmax",
    "feature_dropout": "",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "moveaxis": "movedim",
    "reshape_as": "view_as",
    "concat": "cat",
    "concatenate": "cat",
    "clamp_min": "",
    "_unsafe_view": "view",
    "index_put": "",
    "scaled_dot_product_attention": "sdpa",
    "to": "cast",
    "type": "cast",
    "type_as": "cast",
    "float": "cast",
    "half": "cast",
    "bfloat16": "cast",
    "double": "cast",
    "bool": "cast",
    "int": "cast",
    "long": "cast",
    "cuda": "cast",
    "cpu": "cast",
    "_to_copy": "cast",
    "alias": "detach",
}

_INPLACE_OPERATORS = {
    operator.iadd: "add",
    operator.isub: "sub",
    operator.imul: "mul",
    operator.itruediv: "div",
    operator.ifloordiv: "floordiv",
    operator.iand: "bitwise_and",
    operator.ior: "bitwise_or",
    operator.ixor: "bitwise_xor",
    operator.ipow: "pow",
    operator.imatmul: "matmul",
}


@functools.cache
def _canonical_name(name: str) -> tuple[str, bool] | None:
    """A torch name -> (canonical name, in place)."""
    inplace = False
    if name in PARAMS:
        return name, False
    if name in ALIASES:
        return (ALIASES[name], False) if ALIASES[name] else None
    if name.endswith("_") and not name.endswith("__"):
        name, inplace = name[:-1], True
        name = ALIASES.get(name, name)
    return (name, inplace) if name in PARAMS else None


def _function_table() -> dict[Callable[..., Any], tuple[str, bool]]:
    table: dict[Callable[..., Any], tuple[str, bool]] = {}
    for namespace in (operator, torch, F, torch._C._nn, torch.special):
        for name in dir(namespace):
            known = _canonical_name(name)
            fn = getattr(namespace, name, None)
            if known is not None and callable(fn) and not isinstance(fn, type):
                table.setdefault(fn, known)
    table.update({fn: (name, True) for fn, name in _INPLACE_OPERATORS.items()})
    table[getattr] = ("getattr", False)
    for name in dir(torch.Tensor):  # torch.Tensor.expand(x, ...) called as a function
        known = _canonical_name(name)
        fn = getattr(torch.Tensor, name, None)
        if known is not None and callable(fn):
            table.setdefault(fn, known)
    return table


_FUNCTIONS = _function_table()


def _bind(params: tuple[str, ...], args: tuple[Arg, ...], kwargs: dict[str, Arg]) -> dict[str, Arg]:
    bound: dict[str, Arg] = {}
    for position, param in enumerate(params):
        if param.startswith("*"):
            rest = args[position:]
            if len(rest) == 1 and isinstance(rest[0], (tuple, list, torch.Size)):
                rest = tuple(rest[0])
            if rest:
                bound[param[1:]] = tuple(rest)
            args = args[:position]
            break
        if position < len(args):
            bound[param] = args[position]
    for name, value in kwargs.items():
        bound["input" if name == "self" and "input" in params else name] = value
    return bound


def call(node: Arg) -> Call | None:
    """The canonical view of a node, or None for a placeholder, a constant or an operation this package doesn't know."""
    if not isinstance(node, fx.Node):
        return None
    params: tuple[str, ...] | None = None
    if node.op == "call_method":
        known = _canonical_name(str(node.target))
        if known is not None:
            params = METHOD_PARAMS.get(known[0])
    elif node.op == "call_function":
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            namespace, _, name = target._schema.name.partition("::")
            if namespace != "aten":
                return None
            known = _canonical_name(name)
            if known is not None:
                args = _bind(tuple(a.name for a in target._schema.arguments), node.args, node.kwargs)
                return Call(known[0], _rename_aten(known[0], args), node, known[1])
        elif isinstance(target, torch._ops.OpOverloadPacket):  # since torch 2.15 Dynamo leaves x.mT as aten.mT
            namespace, _, name = target._qualified_op_name.partition("::")
            known = _canonical_name(name) if namespace == "aten" else None
            if known is not None:
                args = _rename_aten(known[0], _bind(PARAMS[known[0]], node.args, node.kwargs))
                return Call(known[0], args, node, known[1])
        else:
            function: Any = target
            known = _FUNCTIONS.get(function)
            params = FUNCTION_PARAMS.get(function)
    else:
        return None
    if known is None:
        return None
    name, inplace = known
    args = _bind(params or PARAMS[name], node.args, node.kwargs)
    if name == "dropout" and args.get("inplace") is True:
        inplace = True
    if name in ("setitem", "copy", "fill", "zero"):
        inplace = name == "setitem" or inplace
    return Call(name, args, node, inplace)


_ATEN_NAMES = {
    "dropout": {"train": "training"},
    "bmm": {"mat2": "other"},
    "softmax": {"half_to_float": "_half_to_float"},
    "expand": {"size": "sizes"},
    "view": {"size": "shape"},
    "where": {"self": "input"},
    "einsum": {"tensors": "operands"},
}


def _rename_aten(op: str, args: dict[str, Arg]) -> dict[str, Arg]:
    """ATen's argument names -> ours; ``self`` is ``input``."""
    names = {"self": "input", **_ATEN_NAMES.get(op, {})}
    if op == "arange":
        args = dict(args)
        bounds = [args.pop(k) for k in ("start", "end", "step") if k in args]
        return {"bounds": tuple(bounds), **args}
    if op in ("ones", "zeros", "empty", "full") and "size" in args:
        args = {**args, "size": tuple(args["size"]) if isinstance(args["size"], list) else args["size"]}
    return {names.get(k, k): v for k, v in args.items()}


def value(node: Arg) -> Any:
    """The fake tensor, SymInt or number that a node stands for (constants stand for themselves), or None."""
    if not isinstance(node, fx.Node):
        return node
    return node.meta.get("example_value", node.meta.get("val"))


def tensor(node: Arg) -> torch.Tensor | None:
    """The fake tensor of a node, or None if it is not a tensor or has no metadata."""
    v = value(node)
    return v if isinstance(v, torch.Tensor) else None


def number(node: Arg) -> int | float | None:
    """A constant Python number: a literal, or a node whose value is a plain number; SymInt and SymFloat are none."""
    v = value(node)
    if isinstance(v, bool) or not isinstance(v, (int, float)):
        return None
    return v
