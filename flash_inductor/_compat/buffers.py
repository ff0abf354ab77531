"""Reading a module's buffers while its graph is compiled, and recompiling if they change.  Private Dynamo names.

A causal buffer (nanoGPT's ``self.bias``) proves a mask only as long as it holds what it held at compile time.  So a
guard goes into the compiled frame: it passes while the buffer is the same tensor at the same version, and otherwise
compares the content.  ``load_state_dict``, ``fill_`` or a new tensor of other content recompile; DDP's broadcast of
buffers, which rewrites them with what they held, doesn't.  Writes through ``buffer.data`` bypass autograd's version
counter by design, and are not seen.
"""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._guards import Guard, TracingContext


def buffer_value(node: fx.Node) -> torch.Tensor | None:
    """The real tensor of a placeholder that is a module's buffer, or None.

    None also for a buffer that can't be guarded: an inference tensor has no version counter, a subclass no plain
    memory, and a graph that isn't compiled by Dynamo has no guards.
    """
    if node.op != "placeholder" or TracingContext.try_get() is None or _source_name(node) is None:
        return None
    real = getattr(node.meta.get("grapharg"), "example", None)
    if type(real) is not torch.Tensor or real.is_inference() or real.layout is not torch.strided:
        return None
    return None if real.is_meta or real.requires_grad else real


def guard_unchanged(nodes: Iterable[fx.Node]) -> bool:
    """Make the frame being compiled recompile once these buffers hold other values; False if that can't be done."""
    wanted = [(node, buffer_value(node)) for node in nodes]
    if any(value is None for _, value in wanted):
        return False
    context = TracingContext.try_get()
    if context is None:
        return not wanted
    for node, value in wanted:
        assert value is not None  # checked above; the loop is apart so that a refusal adds no guard
        source = node.meta["grapharg"].source
        context.guards_context.dynamo_guards.add(Guard(source, _Unchanged(str(_source_name(node)), value).install))
    return True


def _source_name(node: fx.Node) -> str | None:
    """The Python expression for a buffer, over the frame's locals L and globals G."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", None)
    name = name() if callable(name) else name  # a method up to torch 2.9
    if not isinstance(name, str) or "._buffers[" not in name or name[:2] not in ("L[", "G["):
        return None
    return None if "(" in name else name


class _Unchanged:
    """A guard on the content of one buffer."""

    def __init__(self, expression: str, value: torch.Tensor) -> None:
        self.expression = expression
        self.code = compile(expression, "<flash_inductor guard>", "eval")
        self.digest = _digest(value)
        self.globals: dict[str, Any] = {}
        self._remember(value)

    def _remember(self, value: torch.Tensor) -> None:
        self.tensor, self.state = weakref.ref(value), (value.data_ptr(), value._version)

    def install(self, builder: Any, guard: Guard) -> None:
        self.globals = builder.scope["G"]
        # at the root and last: guards below a module may be skipped while its dicts are unchanged, and a buffer
        # changes in place without its dict changing
        add = builder.guard_manager.root.add_epilogue_lambda_guard
        words = [f"flash_inductor: {self.expression} holds the values its mask was proved with"]
        try:
            add(self.check, words, guard.user_stack)
        except TypeError:  # two arguments before torch 2.12
            add(self.check, words)

    def check(self, frame_locals: Any) -> bool:
        try:
            value: Any = eval(self.code, {"L": frame_locals, "G": self.globals})
            same_object = value is self.tensor()
            if same_object and (value.data_ptr(), value._version) == self.state:
                return True
            with torch.no_grad():
                same = _digest(value) == self.digest
            if same:
                self._remember(value)
            return same
        except Exception:  # the buffer is gone, or became something that can't be compared: compile again
            return False


def _digest(value: torch.Tensor) -> bytes:
    """A hash of dtype, shape and content."""
    flat = value.detach().cpu().contiguous()
    content = ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())
    head = f"{type(value)} {value.dtype} {tuple(value.shape)} {value.device}".encode()
    return hashlib.blake2b(head + content).digest()
