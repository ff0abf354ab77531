"""What doctor looks at before it runs anything: versions, devices, compilers, settings."""

from __future__ import annotations

import difflib
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch

from .. import config, support
from .._compat import toolchain, unsupported
from ..matching.install import is_enabled
from ..ops import choice, tuned

Status = Literal["ok", "info", "warning", "problem"]
OLDEST_CAPABILITY = (8, 0)
TORCH_SWITCHES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")  # each switches torch.compile off where it is 1


@dataclass(frozen=True)
class Check:
    """One line of the report: what was looked at, what was found, and what to do if that is wrong."""

    name: str
    status: Status
    text: str
    remedy: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def environment(device: str, environ: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """All checks for "cpu" or "cuda"."""
    yield Check("Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield torch_version()
    yield from gpu(device)
    yield triton(device)
    yield compiler(device)
    yield from settings(environ)


def torch_version(version: str = torch.__version__) -> Check:
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    newest = tuple(int(n) for n in unsupported.NEWEST_TESTED.split("."))
    oldest = ".".join(map(str, unsupported.OLDEST))
    if numbers < unsupported.OLDEST:
        return Check(
            "torch", "problem", f"{version} is too old", f"install torch {oldest} to {unsupported.NEWEST_TESTED}"
        )
    if unsupported.is_unsupported():
        return Check("torch", "problem", unsupported.why(), f"install torch {oldest} to {unsupported.NEWEST_TESTED}")
    if numbers > newest:
        words = f"{version} is newer than what is tested ({oldest} to {unsupported.NEWEST_TESTED})"
        return Check("torch", "warning", words, "trust the self-tests below, or install a tested version")
    return Check("torch", "ok", version)


def gpu(device: str) -> Iterator[Check]:
    """The GPU, or why there is none."""
    if torch.version.hip:
        yield Check("GPU", "warning", f"ROCm {torch.version.hip}", "ROCm is not tested; NVIDIA GPUs and CPUs are")
    elif not torch.cuda.is_available():
        built = torch.version.cuda is not None
        if device == "cuda" or shutil.which("nvidia-smi"):
            words = "there is an NVIDIA driver, but " if shutil.which("nvidia-smi") else ""
            words += "torch sees no GPU" if built else "this torch is built for the CPU only"
            remedy = (
                "check nvidia-smi and CUDA_VISIBLE_DEVICES" if built else "install torch with CUDA, see pytorch.org"
            )
            yield Check("GPU", "problem" if device == "cuda" else "warning", words, remedy)
        else:
            yield Check("GPU", "info", "none: attention runs on the CPU")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        yield one_gpu(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), index)


def one_gpu(name: str, capability: tuple[int, int], index: int = 0) -> Check:
    words = f"cuda:{index} {name}, compute capability {capability[0]}.{capability[1]}"
    if capability < OLDEST_CAPABILITY:
        remedy = "the kernels need compute capability 8.0 (A100, RTX 30 or newer); leave the plugin off on this GPU"
        return Check("GPU", "problem", f"{words}: too old", remedy)
    return Check("GPU", "ok", words)


def triton(device: str) -> Check:
    try:
        import triton as found
    except ImportError as error:
        remedy = "pip install triton, in the version that your torch names"
        return Check("triton", "problem" if device == "cuda" else "info", f"missing: {error}", remedy)
    return Check("triton", "ok", found.__version__)


def compiler(device: str) -> Check:
    """On a CPU Inductor needs a C++ compiler, on a GPU Triton a C compiler, once for each kind of kernel."""
    if device == "cpu":
        found = toolchain.cpp_compiler()
        where = found and shutil.which(found)
        remedy = "install g++ (apt install g++, dnf install gcc-c++), or name a compiler in the variable CXX"
        missing = "none: torch.compile can't compile for the CPU"
        return Check("C++ compiler", "ok", where) if where else Check("C++ compiler", "problem", missing, remedy)
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang", "cc"]
    where = next((path for name in names if (path := shutil.which(name))), None)
    remedy = "install gcc (apt install gcc), or name a compiler in the variable CC"
    missing = "none: Triton can't build what launches its kernels"
    return Check("C compiler", "ok", where) if where else Check("C compiler", "problem", missing, remedy)


def settings(environ: Mapping[str, str]) -> Iterator[Check]:
    """What isn't as by default, and variables that mean nothing."""
    current, default = config.get_config(), config.Config()
    changed = [f for f in fields(current) if getattr(current, f.name) != getattr(default, f.name)]
    words = ", ".join(f"{f.name}={getattr(current, f.name)!r}" for f in changed) or "all by default"
    yield Check("settings", "info", f"{words}; the plugin is {'on' if is_enabled() else 'off'} in this process")
    yield table()
    for name in TORCH_SWITCHES:
        if environ.get(name) == "1":
            yield Check(name, "problem", "torch.compile compiles nothing, so nothing is rewritten", f"unset {name}")
    if current.cpu == "off":
        yield Check("cpu=off", "warning", "attention on the CPU is left alone", f"unset {config.ENV_PREFIX}CPU")
    for name, why in config.read_environment(environ)[1].items():
        yield Check(name, "problem", f"ignored: {why}", f"correct or unset {name}")
    known = variables()
    for name in sorted(n for n in environ if n.startswith(config.ENV_PREFIX) and n not in known):
        near = difflib.get_close_matches(name, known, 1)
        remedy = f"write {near[0]}" if near else f"use one of {', '.join(sorted(known))}"
        yield Check(name, "warning", "no setting has this name, so the variable does nothing", remedy)


def table() -> Check:
    """The user's own table of kernels and tiles."""
    path = config.table_path(config.get_config())
    if path is None or not path.exists():
        return Check("table", "info", "none of your own; on a GPU flash-inductor tune makes one")
    try:
        gpus = ", ".join(f"{c // 10}.{c % 10}" for c in tuned.parse(path.read_text()).kernels)
    except (OSError, ValueError) as error:
        remedy = "make it again with flash-inductor tune, or delete it"
        return Check("table", "warning", f"{path} is not used: {error}", remedy)
    return Check("table", "ok", f"{path}, for compute capability {gpus or 'none'}")


def variables() -> set[str]:
    """Every environment variable that means something to the package."""
    return {config.ENV_PREFIX + f.name.upper() for f in fields(config.Config)}


def kernels(device: str) -> list[dict[str, Any]]:
    """What plain, causal and windowed attention of usual sizes would run as: {"problem", "forward", "backward"}."""
    found = []
    for head_dim in (64, 128, 256) if device == "cuda" else (128,):
        for words, spec in _PROBLEMS.items():
            shape = (1, 16, 4096, head_dim)
            dtype = torch.bfloat16
            chosen = choice.of_site(spec, shape, shape, shape, dtype, torch.device(device))
            name = support.kernel_name(spec, shape, shape, shape, "bfloat16", device, chosen=chosen)
            found.append({"problem": f"{words}, head dim {head_dim}", "kernel": name})
    return found


_PROBLEMS = {
    "full": support.AttentionSpec(),
    "causal": support.AttentionSpec(mask=support.MaskSpec(None, 0)),
    "causal, window 1024": support.AttentionSpec(mask=support.MaskSpec(-1024, 0)),
    "causal, softcap 50": support.AttentionSpec(mask=support.MaskSpec(None, 0), softcap=50.0),
}
