"""The kernels compiled for GPUs that aren't here: registers, spills, shared memory, and tensor core instructions."""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from flash_inductor.kernels.backward import grad_key_value_kernel, grad_query_kernel
from flash_inductor.kernels.configs import Config, Kind, configs, shared_memory_bytes
from flash_inductor.kernels.forward import forward_kernel

_KERNELS: dict[Kind, Any] = {"fwd": forward_kernel, "dq": grad_query_kernel, "dkdv": grad_key_value_kernel}
VERSION = ".".join(triton.__version__.split(".")[:2])
# What Triton itself tells ptxas, since 3.7; registers and spills depend on it.
_OPTIONS = [x for x in ("--regAllocOptLevel=2",) if x in inspect.getsource(compiler)]
_ROW_STRIDES = ("sqm", "skn", "svn", "som", "sdm", "sgm", "sgkn", "sgvn")
# Bytes a block may use, by compute capability.
SHARED_MEMORY = {75: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


@dataclass(frozen=True)
class Resources:
    registers: int
    spilled_bytes: int
    shared_memory: int
    async_copies: int
    wgmmas: int
    warnings: tuple[str, ...]


def compile_kernel(kind: Kind, arch: int, head_dim: int, config: Config, dtype: str = "bf16", **options: bool) -> Any:
    """A compiled kernel for a causal mask; options: lower, softcap."""
    block_d = max(16, triton.next_power_of_2(head_dim))
    constants = {
        "HEAD_DIM": head_dim, "V_HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_DV": block_d,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "HAS_UPPER": True,
        "HAS_LOWER": options.get("lower", False), "SOFTCAP": options.get("softcap", False),
        "PRECISION": "tf32", "FAST_TANH": dtype == "bf16", "ALIGN": 8, "NEGATIVE_SCALE": False,
        "feats": None, "FEATURES": 0,
        **dict.fromkeys(_ROW_STRIDES, 16 * head_dim),
    }  # fmt: skip
    kernel = _KERNELS[kind]
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name in ("lse_ptr", "delta_ptr") else f"*{dtype}"
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in ("sm_scale", "softcap") else "i32"
    constexprs = {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    launch = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch)


def resources(compiled: Any) -> Resources:
    """What ptxas says of the kernel; its registers can't be asked of the driver without a GPU."""
    ptx = compiled.asm["ptx"]
    tool = get_ptxas(compiled.metadata.target.arch)  # newer Tritons give sm_90 the newer one
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [tool.path, "-v", *_OPTIONS, f"-arch={target.group(1)}", file.name, "-o", "/dev/null"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr

    def number(pattern: str) -> int:
        found = re.search(pattern, text)
        assert found is not None, text
        return int(found.group(1))

    return Resources(
        registers=number(r"Used (\d+) registers"),
        spilled_bytes=number(r"(\d+) bytes spill stores"),
        shared_memory=compiled.metadata.shared,
        async_copies=ptx.count("cp.async.cg"),
        wgmmas=ptx.count("wgmma.mma_async"),
        warnings=tuple(re.findall(r"C75\d\d", text)),
    )


def check_hopper(found: Resources, spilled: int) -> None:
    """A Gluon kernel may spill so many bytes a thread, and its products must overlap with other work.

    The ptxas that comes with Triton 3.9 (13.4) spills more than those the kernels were tuned with, 12.8 and 12.9.
    """
    assert found.wgmmas > 0
    assert found.shared_memory <= SHARED_MEMORY[90]
    assert found.warnings == (), "ptxas serialises the products"
    assert found.spilled_bytes <= spilled + (128 if VERSION == "3.9" else 0), found


# Bytes a thread may spill in the default config on sm_90: what it spills today, rounded up.  The table is ordered by
# measured speed, and the fastest dK/dV tiles spill a little: their two accumulators fill the register file.
# Other Tritons than 3.7 have budgets of their own: one loose number for all would guard none.
_BUDGETS: dict[tuple[Kind, int], int] = {
    ("fwd", 64): 16, ("dq", 64): 48, ("dkdv", 64): 0,
    ("fwd", 128): 0, ("dq", 128): 0, ("dkdv", 128): 100,
    ("fwd", 256): 64, ("dq", 256): 128, ("dkdv", 256): 128,
}  # fmt: skip

_BUDGETS_OF: dict[str, dict[tuple[Kind, int], int]] = {
    "3.6": {("dkdv", 128): 192, ("dkdv", 256): 448},
    "3.8": {("dkdv", 256): 144},
    "3.9": {("dkdv", 256): 416},
}


@pytest.mark.parametrize(("kind", "head_dim"), _BUDGETS)
def test_hopper(kind: Kind, head_dim: int) -> None:
    config = configs(kind, 90, head_dim, head_dim, 2, SHARED_MEMORY[90])[0]
    found = resources(compile_kernel(kind, 90, head_dim, config))
    assert found.wgmmas > 0
    assert found.async_copies > 0, "loads aren't pipelined"
    assert found.warnings == (), "ptxas serialises the wgmma"
    budget = {**_BUDGETS, **_BUDGETS_OF.get(VERSION, {})}[kind, head_dim]
    assert found.spilled_bytes <= budget, found
    assert found.shared_memory <= shared_memory_bytes(kind, config, head_dim, head_dim, 2, 90) <= SHARED_MEMORY[90]


@pytest.mark.parametrize("kind", _KERNELS)
def test_hopper_softcap_window(kind: Kind) -> None:
    config = configs(kind, 90, 256, 256, 2, SHARED_MEMORY[90])[0]
    found = resources(compile_kernel(kind, 90, 256, config, softcap=True, lower=True))
    assert found.wgmmas > 0
    assert found.warnings == ()
    assert found.spilled_bytes <= (416 if VERSION == "3.9" else 256), found


def test_odd_head_dim_is_pipelined() -> None:
    """A head dim that is a multiple of 8 only still gets 16-byte asynchronous loads."""
    found = resources(compile_kernel("fwd", 90, 40, configs("fwd", 90, 64, 64, 2)[0]))
    assert found.async_copies > 0


@pytest.mark.parametrize("arch", [80, 86, 100])
@pytest.mark.parametrize(("kind", "head_dim"), [("fwd", 64), ("dq", 128), ("dkdv", 128)])
def test_other_architectures(arch: int, kind: Kind, head_dim: int) -> None:
    config = configs(kind, arch, head_dim, head_dim, 2, SHARED_MEMORY[arch])[0]
    found = resources(compile_kernel(kind, arch, head_dim, config))
    estimate = shared_memory_bytes(kind, config, head_dim, head_dim, 2, arch)
    assert found.shared_memory <= estimate <= SHARED_MEMORY[arch]
    assert found.async_copies > 0
    assert found.spilled_bytes <= (272 if VERSION == "3.6" else 256), found


@pytest.mark.parametrize("arch", [86, 100])
def test_largest_head_dim_fits(arch: int) -> None:
    config = configs("dkdv", arch, 256, 256, 2, SHARED_MEMORY[arch])[0]
    found = resources(compile_kernel("dkdv", arch, 256, config))
    assert found.shared_memory <= shared_memory_bytes("dkdv", config, 256, 256, 2, arch) <= SHARED_MEMORY[arch]


@pytest.mark.parametrize("kind", _KERNELS)
def test_fp32_fits(kind: Kind) -> None:
    config = configs(kind, 90, 64, 64, 4, SHARED_MEMORY[90])[0]
    found = resources(compile_kernel(kind, 90, 64, config, dtype="fp32"))
    assert found.shared_memory <= shared_memory_bytes(kind, config, 64, 64, 4, 90) <= SHARED_MEMORY[90]


@pytest.mark.parametrize("kind", _KERNELS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("block_d", [16, 64, 128, 256])
@pytest.mark.parametrize(("capability", "limit"), SHARED_MEMORY.items())
def test_table_respects_shared_memory(kind: Kind, itemsize: int, block_d: int, capability: int, limit: int) -> None:
    found = configs(kind, capability, block_d, block_d, itemsize, limit)
    if (capability, itemsize, block_d) == (75, 4, 256):
        assert found == (Config(16, 16, 4, 1),)  # nothing fits: Triton says so when the kernel is loaded
        return
    for config in found:
        assert shared_memory_bytes(kind, config, block_d, block_d, itemsize, capability) <= limit, config
