"""What has to hold around a site before it may be replaced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from . import canonical, effects
from .program import Program, Refused

# Calls that change how the nodes after them run, by name: they are no part of torch's documented interface.
_AUTOCAST = ("_enter_autocast", "_exit_autocast")
_GRAD_MODE = ("_set_grad_enabled", "set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode")
_SDPA_KERNEL = "_sdpa_kernel"


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def changes_mode(node: fx.Node) -> bool:
    """Whether the nodes after this one run under another autocast, grad mode or choice of SDPA backends."""
    return _name(node) in _AUTOCAST or _name(node) in _GRAD_MODE or _name(node) == _SDPA_KERNEL


def without_grad(program: Program) -> frozenset[fx.Node]:
    """The nodes that run while gradients are off; metadata doesn't tell, a view made there still requires one."""
    enabled, inference, found = torch.is_grad_enabled(), 0, set[fx.Node]()
    for node in program.nodes:
        name = _name(node)
        if name in ("_set_grad_enabled", "set_grad_enabled"):
            enabled = bool(node.args[0]) if node.args else False
        inference += (name == "_enter_inference_mode") - (name == "_exit_inference_mode")
        if not enabled or inference:
            found.add(node)
    return frozenset(found)


def value_users(node: fx.Node) -> list[fx.Node]:
    """The users that read more of a tensor than its shape, dtype and device."""
    return [u for u in node.users if node in effects.data_inputs(u)]


def check_users(program: Program, matched: Sequence[fx.Node], last: fx.Node) -> None:
    """Raise Refused if an intermediate result of the site is needed elsewhere."""
    inside = set(matched) | {last}
    for node in matched:
        for user in value_users(node):
            if user not in inside:
                where = "returned" if user.op == "output" else f"used by `{user.name}`"
                raise Refused(
                    f"`{node.name}`, an intermediate result of the attention, is also {where}; "
                    "don't ask for attention weights (output_attentions=False, need_weights=False)"
                )
        for target in effects.written(node):
            _check_written(program, node, target, inside)


def _check_written(program: Program, writer: fx.Node, target: fx.Node, inside: set[fx.Node]) -> None:
    """Raise Refused if somebody else would see that an in-place step of the site is gone."""
    for alias in program.nodes:
        if not (program.storages(alias) & program.storages(target)):
            continue
        late = [u for u in value_users(alias) if program.position[u] > program.position[writer] and u not in inside]
        if late or alias.op in ("placeholder", "get_attr"):
            raise Refused(
                f"`{writer.name}` writes the scores in place into `{alias.name}`, which is seen elsewhere; "
                "use an operation that isn't in place"
            )


def check_region(program: Program, matched: Iterable[fx.Node], last: fx.Node, inputs: Iterable[fx.Node]) -> None:
    """Raise Refused if between the site's first and last node the inputs are written to, or modes change."""
    nodes = set(matched) | {last}
    first = min(nodes, key=program.position.__getitem__)
    for node in program.between(first, last):
        if changes_mode(node):
            raise Refused(
                f"autocast, grad mode or the SDPA backend changes within the attention (`{_name(node)}`); "
                "enter and leave such contexts around the whole attention"
            )
    for source in inputs:
        for writer, _ in program.writes_between(source, program.position[first], program.position[last]):
            if writer not in nodes:
                raise Refused(
                    f"`{source.name}` is written to in place by `{writer.name}` within the attention; "
                    "write before or after the attention, or to a copy"
                )


def check_backend_choice(program: Program, node: fx.Node) -> None:
    """Raise Refused if the user chose a backend of SDPA, by a context inside or around the compiled function."""
    chosen: fx.Node | None = None
    for other in program.nodes[: program.position[node]]:
        if _name(other) == _SDPA_KERNEL:
            chosen = other
    if chosen is not None:
        backends = chosen.args[0] if chosen.args else ()
        one = not isinstance(backends, (tuple, list)) or len(backends) < 3
    else:
        flags = torch.backends.cuda
        one = [flags.flash_sdp_enabled(), flags.mem_efficient_sdp_enabled(), flags.math_sdp_enabled()].count(True) < 2
    if one:
        raise Refused("torch.nn.attention.sdpa_kernel forces an SDPA backend here; leave the choice open")


def check_tensor(node: fx.Node, role: str) -> torch.Tensor:
    """The fake tensor of an input, or Refused if it is no plain floating-point tensor of CPU or CUDA."""
    value = canonical.tensor(node)
    if value is None:
        raise Refused(f"the {role} has no known shape; compile with dynamic=False")
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise Refused(f"the {role} is inside torch.func (grad, vmap, ...); call flash_inductor.attention there")
    plain = type(value) is FakeTensor or (isinstance(value, FakeTensor) and isinstance(value, torch.nn.Parameter))
    if not plain:
        raise Refused(
            f"the {role} is a {type(value).__name__}, not a plain tensor; "
            "take its plain tensor (for DTensor .to_local()), or call the attention on plain tensors"
        )
    if value.layout is not torch.strided or value.is_nested:
        raise Refused(f"the {role} is not a dense tensor; pad it to a dense one, with a mask of the padding")
    if not value.dtype.is_floating_point:
        raise Refused(f"the {role} is {value.dtype}; cast it to a floating-point dtype")
    return value


def check_worth(device: torch.device, q_len: int | torch.SymInt | None) -> None:
    """Raise Refused for a step of decoding on a GPU.

    One query against a cache reads the keys and values once whatever the kernel, and a kernel that gives each block of
    queries to one program leaves most of the GPU idle, where the stock ones split the keys.
    """
    if device.type == "cuda" and isinstance(q_len, int) and q_len == 1:
        raise Refused(
            "a decoding step with one query; the stock kernels split its keys over the GPU; "
            "nothing to do: they are made for it"
        )


def written_after(program: Program, node: fx.Node) -> bool:
    """Whether the memory of a node is written to after it ran."""
    return bool(program.writes_between(node, program.position[node], len(program.nodes)))


_SEES_STRIDES_NOT = frozenset(
    "matmul bmm baddbmm einsum contiguous size dim softmax sum amax max".split()  # noqa: SIM905
)
_PASSES_STRIDES_ON = frozenset(
    "reshape flatten transpose permute t mT numpy_T movedim unsqueeze squeeze getitem select slice narrow "  # noqa: SIM905
    "chunk split unbind expand cast dropout add sub mul div neg tanh where masked_fill detach clone".split()
)


def strides_matter(node: fx.Node) -> bool:
    """Whether something after ``node`` may see the strides of its result: a view, the graph's output, the unknown."""
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        for user in current.users:
            c = canonical.call(user)
            if c is not None and (c.op in _SEES_STRIDES_NOT and not c.inplace):
                continue
            if _name(user) in ("linear", "layer_norm", "rms_norm"):
                continue
            if current not in effects.data_inputs(user):
                continue
            if c is None or c.op not in _PASSES_STRIDES_ON:
                return True
            if user not in seen:
                seen.add(user)
                pending.append(user)
    return False
