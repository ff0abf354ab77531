"""The private Inductor names that the lowerings need, behind names of our own; torch 2.11 .. 2.15.

Importing this module fails with ImportError or AttributeError on a torch that moved one of them;
:mod:`flash_inductor.lowering` then registers nothing, and Inductor calls the op as an extern kernel.

Differences served here: ``autotune_select_algorithm`` returns a TensorBox in 2.11 and a (TensorBox, choice) pair since
2.12; ``TritonTemplate(always_freeze_layout=)`` exists since 2.12.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._inductor import config as _config
from torch._inductor.ir import ExternKernel, FallbackKernel, FixedLayout, FlexibleLayout, TensorBox
from torch._inductor.lowering import constrain_to_fx_strides, fallback_handler, lowerings, register_lowering
from torch._inductor.lowering import empty_strided as _empty_strided
from torch._inductor.runtime.benchmarking import benchmarker
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, autotune_select_algorithm
from torch._inductor.utils import convert_shape_to_inductor
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import _disable_current_modes as no_modes
from torch.utils._sympy.functions import FloorDiv

IRNode = Any  # TensorBox: a tensor of the graph being lowered
Expr = Any  # int | sympy.Expr: a size

__all__ = ["SymbolicGridFn", "no_modes"]


def lowering(op: torch._ops.OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: lower ``op`` with this function, its arguments as they are (no promotion, no broadcasting)."""
    return register_lowering(op, type_promotion_kind=None, broadcast=False)


def fallback(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """A lowering of ``op`` that calls the op itself."""
    call = fallback_handler(op, add_to_fallback_set=False)
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.kwarg_only}

    def lower(*args: Any, **kwargs: Any) -> Any:
        # AOTInductor's package lists the keyword arguments that are given, its code passes the integers of all.
        return call(*args, **({**defaults, **kwargs} if is_ahead_of_time() else kwargs))

    return lower


def call_directly(results: Any, function: str) -> None:
    """Let generated Python call a function, by its name from ``torch``, instead of the op whose results these are.

    Where the private names moved, or the wrapper is C++, the op is called: slower, but the same.
    """
    try:
        node = results[0].data.data.inputs[0]
        if isinstance(node, FallbackKernel) and not V.graph.cpp_wrapper:
            node.python_kernel_name = function
    except (AttributeError, IndexError, TypeError):
        pass


def max_autotune() -> bool:
    """Whether the user asked for measured choices."""
    return bool(_config.max_autotune)


def is_ahead_of_time() -> bool:
    """Whether the code is to run without Python (AOTInductor), where an op written in it can't be called."""
    return bool(V.graph.aot_mode)


def template(name: str, grid: Any, source: str) -> TritonTemplate:
    """A TritonTemplate, or the one that already has this name (a module may be executed twice: importlib.reload)."""
    existing = TritonTemplate.all_templates.get(name)
    if existing is not None:
        return existing
    # Layouts of our inputs are frozen by `strided_input`; a later change would contradict the strides in the text.
    options = {"always_freeze_layout": True}
    known = inspect.signature(TritonTemplate.__init__).parameters
    return TritonTemplate(name=name, grid=grid, source=source, **{k: v for k, v in options.items() if k in known})


def append_choice(
    to: list[Any],
    of: TritonTemplate,
    inputs: Sequence[IRNode],
    layout: FixedLayout,
    call_sizes: Sequence[Expr],
    mutated: Sequence[IRNode],
    num_warps: int,
    num_stages: int,
    constants: dict[str, Any],
) -> Exception | None:
    """Render one configuration and append it to the choices; the error, if it can't be rendered."""
    try:
        return of.maybe_append_choice(
            choices=to,
            input_nodes=tuple(inputs),
            layout=layout,
            mutated_inputs=list(mutated),
            call_sizes=list(call_sizes),
            num_warps=num_warps,
            num_stages=num_stages,
            **constants,
        )
    except Exception as error:  # one bad configuration must not take the others, or the compile, with it
        return error


def select(name: str, choices: list[Any], inputs: Sequence[IRNode], layout: FixedLayout) -> IRNode:
    """The result of the best choice: measured if there are several."""
    # A deferred decision (MultiTemplateBuffer) forgets which inputs a kernel writes: lse and grad_value.
    result = autotune_select_algorithm(name, choices, list(inputs), layout, return_multi_template=False)
    return result[0] if isinstance(result, tuple) else result


def strided_input(x: IRNode) -> IRNode:
    """``x`` as the input of a template: in memory, strides final, innermost stride 1 (copied if it was not)."""
    x = _realized(x)
    if V.graph.sizevars.statically_known_equals(x.get_stride()[-1], 1):
        return x
    return contiguous_input(x)


def any_input(x: IRNode) -> IRNode:
    """``x`` as the input of a template: in memory, strides final, whatever they are."""
    return _realized(x)


def contiguous_input(x: IRNode) -> IRNode:
    """``x`` as a contiguous input of a template."""
    return _realized(ExternKernel.require_contiguous(x))


def _realized(x: IRNode) -> IRNode:
    realized = ExternKernel.realize_input(x)
    if not isinstance(realized, TensorBox):
        realized = TensorBox(realized)
    realized.freeze_layout()
    return realized


def in_traced_layout(args: Sequence[Any]) -> list[Any]:
    """The positional arguments of the node being lowered, in memory, dims ordered as when it was traced.

    An op that is called then gives its outputs the strides that its fake promised.
    """
    return list(constrain_to_fx_strides(V.graph.current_node, *args)[0])


def has_strides_of(x: IRNode, elements: int) -> bool:
    """Whether the last dim is contiguous and all else known to be multiples of so many elements, none of them 0."""
    layout, sizevars = x.get_layout(), V.graph.sizevars
    *strides, last = layout.stride
    steps = [stride for size, stride in zip(layout.size, strides, strict=False) if static_int(size) != 1]
    return sizevars.statically_known_equals(last, 1) and all(
        sizevars.statically_known_multiple_of(sympy.sympify(step), elements)
        and not sizevars.statically_known_equals(step, 0)
        for step in (*steps, *([layout.offset] if static_int(layout.offset) != 0 else []))
    )


def real_like(inputs: Sequence[IRNode | None], device: torch.device) -> list[Tensor | None]:
    """Real tensors of random numbers for inputs in memory, symbols replaced by what they were when traced."""
    generator = torch.Generator(device)  # torch's own keeps its state

    def one(x: IRNode | None) -> Tensor | None:
        if x is None:
            return None
        size, stride = ([hint(n) for n in numbers] for numbers in (x.get_size(), x.get_stride()))
        return torch.empty_strided(size, stride, dtype=x.get_dtype(), device=device).normal_(generator=generator)

    with no_modes():
        return [one(x) for x in inputs]


def meta_like(inputs: Sequence[IRNode | None]) -> list[Tensor | None]:
    """The same without memory."""

    def one(x: IRNode | None) -> Tensor | None:
        if x is None:
            return None
        size, stride = ([hint(n) for n in numbers] for numbers in (x.get_size(), x.get_stride()))
        return torch.empty_strided(size, stride, dtype=x.get_dtype(), device="meta")

    with no_modes():
        return [one(x) for x in inputs]


def milliseconds(function: Callable[[], Any]) -> float:
    """Time of a call on the GPU."""
    with no_modes():
        return float(benchmarker.benchmark_gpu(function))


def expanded_dims(argument: str) -> list[int]:
    """The dims of an argument of the node being lowered in which it has stride 0 and more than one element."""
    node: Any = V.graph.current_node
    names = [a.name for a in node.target._schema.arguments]
    position = names.index(argument)
    given: Any = node.args[position] if position < len(node.args) else node.kwargs[argument]
    value = given.meta["val"]
    return [
        dim
        for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True))
        if isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size <= 1)
    ]


def ceil_div(size: Expr, step: int) -> Expr:
    """How many steps cover a size."""
    return FloorDiv(sympy.sympify(size) + (step - 1), step)


def output_layout(index: int) -> FixedLayout:
    """Layout of an output of the node being lowered: exactly what the op's fake said."""
    value = V.graph.current_node.meta["val"][index]
    return FixedLayout(
        value.device,
        value.dtype,
        list(convert_shape_to_inductor(value.shape)),
        list(convert_shape_to_inductor(value.stride())),
    )


def contiguous_layout(x: IRNode, size: Sequence[Expr] | None = None, dtype: torch.dtype | None = None) -> FixedLayout:
    """The layout of a contiguous tensor on the device of ``x``; of its shape and dtype unless others are given."""
    size = list(x.get_size() if size is None else size)
    return FixedLayout(x.get_device(), dtype or x.get_dtype(), size, FlexibleLayout.contiguous_strides(size))


def output_is_used(index: int) -> bool:
    """Whether anything in the graph reads this output of the node being lowered."""
    # FX can't drop one output of a node, so an unused one shows only in its users
    for user in V.graph.current_node.users:
        if user.target is not operator.getitem or (user.args[1] == index and len(user.users) > 0):
            return True
    return False


def allocate(layout: FixedLayout) -> IRNode:
    """An uninitialised buffer, to be written by a template that gets it as a mutated input."""
    return _empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=layout.device)


def allocate_realized(layout: FixedLayout) -> IRNode:
    """The same, in memory already."""
    return _realized(allocate(layout))


def static_int(size: Expr) -> int | None:
    """The number a size is, or None if it is symbolic."""
    size = sympy.sympify(size)
    return int(size) if size.is_Integer else None


def hint(size: Expr, unknown: int = 4096) -> int:
    """The number that a size was when traced."""
    number = static_int(size)
    return V.graph.sizevars.optimization_hint(sympy.sympify(size), fallback=unknown) if number is None else number


def known_equal(a: Expr, b: Expr) -> bool:
    """Whether two sizes are equal whatever the symbols are."""
    return bool(V.graph.sizevars.statically_known_equals(sympy.sympify(a), sympy.sympify(b)))


def simplify(size: Expr) -> Expr:
    """A size with everything the guards say about it put in."""
    return V.graph.sizevars.simplify(sympy.sympify(size))


def has_unbacked(sizes: Sequence[Expr]) -> bool:
    """Whether a size depends on data, so that nothing is known about it (not even that it isn't 0)."""
    return any(bool(free_unbacked_symbols(sympy.sympify(size))) for size in sizes)


def lower_aten(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> IRNode:
    """Lower an ATen or prims op: the result is an ordinary Inductor expression, free to fuse."""
    return lowerings[op](*args, **kwargs)
