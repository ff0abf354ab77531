"""Launches bind a kernel once for each variant, and pass the same arguments afterwards."""

from __future__ import annotations

from typing import Any

from flash_inductor.ops.launch import Bound


class _Compiled:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.calls.append(("compiled", grid, args))


class _Kernel:
    arg_names = ("x", "n", "FIRST", "SECOND")

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> _Compiled:
            self.calls.append(("bound", grid, args, constants))
            return _Compiled(self.calls)

        return launch


def test_binds_once_for_each_variant() -> None:
    kernel = _Kernel()
    constants = {"SECOND": 2, "num_warps": 4, "FIRST": 1}  # in any order, options among them
    bound = Bound(kernel, constants)
    bound.launch(7, ("a", 5), "bf16")
    bound.launch(8, ("b", 6), "bf16")
    bound.launch(9, ("c", 7), "fp16")
    assert kernel.calls == [
        ("bound", (7,), ("a", 5), constants),
        ("compiled", (8, 1, 1), ("b", 6, 1, 2)),
        ("bound", (9,), ("c", 7), constants),
    ]
