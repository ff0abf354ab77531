"""Launches of a kernel that has run before, without the work that Triton's own launch repeats."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any


class Bound:
    """A kernel with its constants.

    Triton derives the types of all arguments at every launch, which takes longer than a short kernel.  Here the caller
    names in ``variant`` whatever else than the constants the kernel is compiled for (dtype, device); arguments that
    Triton would specialise on their value have to be in the kernel's ``do_not_specialize``.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        """``constants``: every constexpr by name, after the arguments in the signature, and Triton's options."""
        self.kernel, self.constants = kernel, constants
        self._values = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._compiled: dict[Hashable, Any] = {}

    def launch(self, blocks: int, arguments: tuple[Any, ...], variant: Hashable) -> None:
        """Launch on the current device and stream."""
        compiled = self._compiled.get(variant)
        if compiled is None:
            self._compiled[variant] = self.kernel[(blocks,)](*arguments, **self.constants)
        else:
            compiled[(blocks, 1, 1)](*arguments, *self._values)
