"""Execute Inductor's generated *CUDA* wrapper on CPU tensors through the Triton interpreter.

``run_in_child`` (parent side) starts one child process for a batch of jobs, because TRITON_INTERPRET=1 must be set
before triton is imported.  The rest of the file is the child's side.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

_KERNEL = re.compile(r"^(\w+) = async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.S | re.M)
_ROOT = Path(__file__).resolve().parents[2]
_IMPORTS = """
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
"""


@dataclass(frozen=True)
class KernelSource:
    """One Triton kernel of a generated wrapper."""

    name: str
    is_template: bool
    body: str  # from @triton.jit on
    num_warps: int
    num_stages: int


def kernel_sources(code: str) -> list[KernelSource]:
    """The Triton kernels in the text of a generated wrapper, in the order they are defined."""
    return [_parse_kernel(m.group(1), m.group(3)) for m in _KERNEL.finditer(code)]


def _parse_kernel(name: str, source: str) -> KernelSource:
    start = source.index("@triton.jit")
    decorator = source[source.index("@triton_heuristics.") : start]

    def number(key: str) -> int:
        found = re.search(rf"{key}=(\d+)", decorator)
        return int(found.group(1)) if found else 0

    return KernelSource(
        name=name,
        is_template=decorator.startswith("@triton_heuristics.template"),
        body=source[start:],
        num_warps=number("num_warps"),
        num_stages=number("num_stages"),
    )


def run_in_child(jobs: Sequence[dict[str, Any]], timeout: float = 500) -> list[list[Any] | str]:
    """For each job ``{"codes": [fw] or [fw, bw], "inputs": [...], "n_outputs": int, "tangents": [...]}``: the values.

    A result holds the forward's outputs, then (if a tangent was given) the backward's outputs: gradients, None where
    an input needs none.  The tangents are appended to what the forward saved.  A job that fails gives its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        jobs_file, results_file = Path(folder) / "jobs.pt", Path(folder) / "results.pt"
        torch.save(list(jobs), jobs_file)
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, __file__, str(jobs_file), str(results_file)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode != 0:
            raise RuntimeError(f"interpreter child failed:\n{done.stderr[-4000:]}")
        return torch.load(results_file, weights_only=False)


# ---------------------------------------------------------------------------------------------- child's side


def patch_bf16_dot() -> None:
    """Make ``tl.dot`` of bf16 right in the interpreter, which multiplies raw uint16 patterns (triton 3.6 .. 3.9)."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter.InterpreterBuilder.create_dot

    def upcast(handle: Any) -> Any:
        if handle.dtype.scalar is not tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, upcast(a), upcast(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


class InterpretedKernel:
    """Stands where the wrapper expects a compiled kernel, and runs its source through the interpreter."""

    def __init__(self, name: str, source: str, folder: str) -> None:
        self.source = _parse_kernel(name, source)
        path = Path(folder) / f"{name}_{len(os.listdir(folder))}.py"  # interpreter needs a real file for the source
        # the fast tanh is a PTX instruction, which the interpreter can't run
        body = self.source.body.replace("FAST_TANH : tl.constexpr = True", "FAST_TANH : tl.constexpr = False")
        body = body.replace("libdevice.exp(", "tl.exp(")  # nor a function of the device's library
        path.write_text(_IMPORTS + body)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found = re.search(r"def (\w+)\(", self.source.body)
        assert found
        self.function = getattr(module, found.group(1))

    def run(self, *args: Any, stream: Any = None, **kwargs: Any) -> None:
        names = self.function.arg_names
        if self.source.is_template:  # arguments, then the fixed grid
            grid = tuple(int(g) for g in args[len(names) : len(names) + 3])
            self.function[grid](*args[: len(names)])
            return
        import triton

        numels = {"XBLOCK": "xnumel", "YBLOCK": "ynumel", "R0_BLOCK": "r0_numel"}
        values = dict(zip([n for n in names if not n.endswith("BLOCK")], args, strict=False))
        for block in (n for n in names if n.endswith("BLOCK")):
            values[block] = min(1024, triton.next_power_of_2(int(values[numels[block]])))
        grid = tuple(
            int(triton.cdiv(values[numel], values.get(block, 1))) if numel in values else 1
            for block, numel in (("XBLOCK", "xnumel"), ("YBLOCK", "ynumel"))
        )
        self.function[(*grid, 1)](*[values[n] for n in names])


def load(code: str, folder: str) -> Callable[[Sequence[Any]], list[Any]]:
    """The ``call`` function of a generated CUDA wrapper, working on CPU tensors."""
    from torch._inductor.async_compile import AsyncCompile

    def make_kernel(self: Any, name: str, source: str, device_str: str = "cuda") -> InterpretedKernel:
        return InterpretedKernel(name, source, folder)

    code = re.sub(
        r"^empty_strided_cuda = .*$",
        "empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)",
        code,
        flags=re.M,
    )
    code = re.sub(r"^from torch\._C import _cuda_getCurrentRawStream as get_raw_stream$", "", code, flags=re.M)
    code = re.sub(r"device=device\(type='cuda', index=0\)|device='cuda(:0)?'", "device='cpu'", code)
    namespace: dict[str, Any] = {"__name__": "generated", "get_raw_stream": lambda index: 0}
    with (
        mock.patch.object(AsyncCompile, "triton", make_kernel),
        mock.patch.object(AsyncCompile, "wait", lambda *args, **kwargs: None),
    ):
        exec(compile(code, "<inductor wrapper>", "exec"), namespace)

    def call(args: Sequence[Any]) -> list[Any]:
        with (
            mock.patch.object(torch.cuda, "_DeviceGuard", lambda index: contextlib.nullcontext()),
            mock.patch.object(torch.cuda, "set_device", lambda index: None),
        ):
            return list(namespace["call"](list(args)))

    return call


def _run_job(job: dict[str, Any], folder: str) -> list[Any]:
    forward = load(job["codes"][0], folder)
    values = forward(job["inputs"])
    outputs, saved = values[: job["n_outputs"]], values[job["n_outputs"] :]
    result = [x.clone() if isinstance(x, torch.Tensor) else x for x in outputs]
    if job.get("tangents"):
        sizes = [x for x in saved if not isinstance(x, torch.Tensor)]  # the backward takes these first
        tensors = [x for x in saved if isinstance(x, torch.Tensor)]
        result += load(job["codes"][1], folder)([*sizes, *tensors, *job["tangents"]])
    return result


def main(jobs_file: str, results_file: str) -> None:
    patch_bf16_dot()
    results: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for job in torch.load(jobs_file, weights_only=False):
            try:
                results.append(_run_job(job, folder))
            except Exception:
                results.append(traceback.format_exc())
    torch.save(results, results_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
