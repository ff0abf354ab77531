"""Compiles a kernel as it would be launched on an H100, on machines that have none."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class _Hopper(DriverBase):
    """A driver that knows its target and nothing else."""

    def __init__(self) -> None:
        pass

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing runs here")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for_hopper(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """What ``kernel[grid](*arguments, **constants)`` would run; CPU tensors stand for CUDA ones."""
    config = triton.runtime.driver
    before = config._active
    config.set_active(_Hopper())
    try:
        return kernel.warmup(*arguments, grid=(1,), **constants)
    finally:
        config._active = before
        kernel.device_caches.clear()  # compiled for a device 0 that isn't this machine's
