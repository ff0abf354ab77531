"""The kernels with optional features compiled for GPUs that aren't here: spills, shared memory, tensor cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flash_inductor.kernels import features
from flash_inductor.kernels.configs import Config, Kind, configs, shared_memory_bytes
from flash_inductor.kernels.grad_bias import CHUNK, grad_bias_kernel

from .test_compile import _KERNELS, SHARED_MEMORY, VERSION, Resources, resources

_KERNEL = {**_KERNELS, "dbias": grad_bias_kernel}
# Name: (entry of feats, types of its parts, arguments of features.flags, bytes for each pair).  A part that is an int
# is a constant: strides of 1, as a launch finds them, and of 0.
_ENTRIES: dict[str, tuple[int, Any, dict[str, Any], int]] = {
    "bias": (0, ("*bf16", "i32", "i32", "i32", 1), {"bias": (True, True)}, 2),
    "bias_fp32": (0, ("*fp32", "i32", "i32", "i32", 1), {"bias": (True, True)}, 4),
    "mask": (1, ("*u8", "i32", "i32", "i32", 1), {"mask": (True, True)}, 1),
    "padding": (1, ("*u8", "i32", 0, 0, 1), {"mask": (False, True)}, 0),
    "segments": (2, ("*i32", "i32", "*i32", "i32"), {"segments": True}, 0),
    "dropout": (3, ("*i64", "i32", "i64", "fp32"), {"dropout": True}, 1),
    "sink": (4, "*fp32", {"sink": True}, 0),
    "range": (5, ("*i32", "i32", 2), {"range": True}, 0),
}


def compile_with(kind: Kind, arch: int, head_dim: int, config: Config, chosen: Sequence[str], causal: bool) -> Any:
    """The kernel for bf16 with these features, its pointers and most strides multiples of 16."""
    kernel = _KERNEL[kind]
    position = kernel.arg_names.index("feats")
    block_d = max(16, triton.next_power_of_2(head_dim))
    constants: dict[str, Any] = {
        "HEAD_DIM": head_dim, "V_HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_DV": block_d,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "HAS_UPPER": causal, "HAS_LOWER": False,
        "SOFTCAP": False, "PRECISION": "tf32", "FAST_TANH": True, "ALIGN": 8, "NEGATIVE_SCALE": False,
        "SUM_ROWS": False, "SUM_COLS": False, "CHUNK": CHUNK, "sgn": 1,
        "FEATURES": features.flags(**{k: v for name in chosen for k, v in _ENTRIES[name][2].items()}),
        **dict.fromkeys(("sqm", "skn", "svn", "som", "sdm", "sgkn", "sgvn"), 16 * head_dim),
        **({"sgm": 16 * head_dim} if kind != "dbias" else {}),
    }  # fmt: skip
    entries: list[Any] = ["constexpr"] * 6
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for name in chosen:
        slot, types, _, _ = _ENTRIES[name]
        if isinstance(types, str):
            entries[slot] = types
            continue
        entries[slot] = tuple("constexpr" if isinstance(x, int) else x for x in types)
        for part, kind_of_part in enumerate(types):
            if isinstance(kind_of_part, int):
                constexprs[position, slot, part] = kind_of_part
            elif kind_of_part.startswith("*") or slot < 2:
                attributes[position, slot, part] = [["tt.divisibility", 16]]
    constexprs |= {(position, slot): None for slot, entry in enumerate(entries) if entry == "constexpr"}
    signature: dict[str, Any] = {}
    for i, name in enumerate(kernel.arg_names):
        if name == "feats":
            signature[name] = tuple(entries)
        elif name in constants:
            signature[name] = "constexpr"
            constexprs[(i,)] = constants[name]
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name in ("lse_ptr", "delta_ptr") else "*bf16"
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in ("sm_scale", "softcap") else "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def check(kind: Kind, arch: int, head_dim: int, chosen: Sequence[str], causal: bool = False) -> Resources:
    """Compile the default config, which has to fit the device; what ptxas says of it."""
    pair_bytes = sum(_ENTRIES[name][3] for name in chosen)
    config = configs(kind, arch, head_dim, head_dim, 2, SHARED_MEMORY[arch], pair_bytes)[0]
    found = resources(compile_with(kind, arch, head_dim, config, chosen, causal))
    estimate = shared_memory_bytes(kind, config, head_dim, head_dim, 2, arch, pair_bytes)
    assert found.shared_memory <= estimate <= SHARED_MEMORY[arch], (config, found)
    return found


# What each model family needs, with the bytes a thread may spill: what it spills today, rounded up.
_HOPPER: list[tuple[Kind, int, tuple[str, ...], int]] = [
    ("fwd", 64, ("bias", "dropout"), 0),
    ("dq", 64, ("bias", "dropout"), 0),
    ("dkdv", 64, ("bias", "dropout"), 64),
    ("dbias", 64, ("bias", "dropout"), 0),
    ("fwd", 64, ("padding", "range", "dropout"), 0),
    ("dkdv", 64, ("padding", "range", "dropout"), 64),
    ("fwd", 128, ("sink",), 0),
    ("fwd", 128, ("segments", "range"), 0),
    ("dq", 128, ("segments", "range"), 0),
    ("dkdv", 128, ("segments", "range"), 128),
    ("fwd", 128, ("mask",), 0),
    ("dkdv", 128, ("bias_fp32",), 64),
]


@pytest.mark.parametrize(("kind", "head_dim", "chosen", "budget"), _HOPPER)
def test_hopper(kind: Kind, head_dim: int, chosen: tuple[str, ...], budget: int) -> None:
    found = check(kind, 90, head_dim, chosen)
    assert found.wgmmas > 0 and found.async_copies > 0
    assert found.warnings == (), "ptxas serialises the wgmma"
    assert found.spilled_bytes <= budget * (2 if VERSION in ("3.6", "3.9") else 1), found


@pytest.mark.parametrize("arch", [80, 100])
@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        ("fwd", ("bias", "dropout")),
        ("dkdv", ("padding", "range", "dropout")),
        ("dq", ("mask", "segments", "range")),
        ("dbias", ("bias_fp32",)),
    ],
)
def test_other_architectures(arch: int, kind: Kind, chosen: tuple[str, ...]) -> None:
    found = check(kind, arch, 64, chosen, causal=True)
    assert found.async_copies > 0
    # What Triton 3.6 makes for Blackwell spills; of later ones it doesn't.
    assert found.spilled_bytes <= (1792 if (VERSION, arch, kind) == ("3.6", 100, "dkdv") else 256), found
