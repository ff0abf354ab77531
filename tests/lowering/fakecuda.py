"""Run Inductor up to generated code for a fake CUDA device, on a machine (and a torch build) without CUDA.

Dynamo, AOTAutograd, the graph passes and the partitioner work on CPU tensors, because autograd on fake CUDA tensors
aborts the process on a CPU-only torch.  Each graph moves to CUDA metadata just before Inductor's inner compile, and
Inductor stops after code generation: nothing is compiled by Triton, nothing is launched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch._inductor.fx_passes.joint_graph as joint_graph
import torch._inductor.fx_passes.post_grad as post_grad
import torch._inductor.runtime.hints as hints
import torch._subclasses.fake_tensor as fake_tensor
from torch._dynamo import device_interface
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from triton.backends.compiler import GPUTarget
from triton.runtime import driver as triton_driver

_STOP = "code generation only"
_DEVICE = torch.device("cuda", 0)


@dataclasses.dataclass(frozen=True)
class Arch:
    """What Inductor asks about a GPU."""

    name: str
    major: int
    minor: int
    processors: int
    shared_memory: int

    @property
    def capability(self) -> int:
        return self.major * 10 + self.minor


ARCHS = {
    "sm80": Arch("NVIDIA A100", 8, 0, 108, 166912),
    "sm90": Arch("NVIDIA H100", 9, 0, 132, 232448),
    "sm100": Arch("NVIDIA B200", 10, 0, 148, 232448),
}


@dataclasses.dataclass
class Lowered:
    """Generated wrapper texts and the graphs they were made from: forward, then backward if training."""

    codes: list[str] = dataclasses.field(default_factory=list)
    graphs: list[torch.fx.GraphModule] = dataclasses.field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(self.codes)

    def placeholder_strides(self, graph: int) -> list[Any]:
        """Strides (or the value itself, for sizes) the code of this graph expects of each input."""
        values = [n.meta["val"] for n in self.graphs[graph].graph.nodes if n.op == "placeholder"]
        return [v.stride() if isinstance(v, torch.Tensor) else v for v in values]


def _properties(arch: Arch) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=arch.name,
        major=arch.major,
        minor=arch.minor,
        total_memory=80 << 30,
        multi_processor_count=arch.processors,
        shared_memory_per_block_optin=arch.shared_memory,
        shared_memory_per_block=49152,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        warp_size=32,
        L2_cache_size=50 << 20,
        gcnArchName="",
        max_threads_per_block=1024,
        is_integrated=False,
    )


def _interface(arch: Arch, properties: types.SimpleNamespace) -> type[device_interface.DeviceInterface]:
    def answer(value: Any) -> Any:
        return staticmethod(lambda *args, **kwargs: value)

    worker = {
        "set_device": answer(None),
        "current_device": answer(0),
        "get_device_properties": answer(properties),
    }
    return type(
        "FakeCudaInterface",
        (device_interface.DeviceInterface,),
        {
            "device": contextlib.nullcontext,
            "Worker": type("Worker", (), worker),
            "get_raw_stream": answer(0),
            "current_device": answer(0),
            "device_count": answer(1),
            "set_device": answer(None),
            "exchange_device": answer(0),
            "maybe_exchange_device": answer(0),
            "is_available": answer(True),
            "get_compute_capability": answer(arch.capability),
            "get_device_properties": answer(properties),
            "synchronize": answer(None),
            "memory_allocated": answer(0),
            "is_bf16_supported": answer(True),
            "is_dtype_supported": answer(True),
            "is_triton_capable": answer(True),
            "raise_if_triton_unavailable": answer(None),
        },
    )


def _device_properties(arch: Arch, original: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in for DeviceProperties.create; the class's fields differ between torch versions."""
    values = {
        "type": "cuda",
        "index": 0,
        "multi_processor_count": arch.processors,
        "cc": arch.capability,
        "major": arch.major,
        "regs_per_multiprocessor": 65536,
        "max_threads_per_multi_processor": 2048,
        "warp_size": 32,
        "max_threads_per_block": 1024,
    }
    cls = hints.DeviceProperties
    names = cls._fields if hasattr(cls, "_fields") else [f.name for f in dataclasses.fields(cls)]

    def create(device: torch.device) -> Any:
        if device.type != "cuda":
            return original(device)
        return cls(**{k: v for k, v in values.items() if k in names})

    return create


def _triton_driver(arch: Arch) -> Any:
    """A driver that only answers what the target is."""
    device = {
        "max_shared_mem": arch.shared_memory,
        "multiprocessor_count": arch.processors,
        "max_num_regs": 65536,
        "warpSize": 32,
    }
    return types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch.capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        is_active=lambda: True,
        get_active_torch_device=lambda: _DEVICE,
        launcher_cls=None,
        utils=types.SimpleNamespace(get_device_properties=lambda _: device),
    )


def _without_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """Stock pattern initialisers trace with real tensors on "cuda" when it is available: give them the CPU."""

    def wrapped(*args: Any) -> Any:
        with mock.patch.object(torch.cuda, "is_available", lambda: False):
            return function(torch.device("cpu")) if args else function()

    return wrapped


@contextlib.contextmanager
def fake_cuda(arch_name: str = "sm90") -> Iterator[Arch]:
    """Inside the block torch, Inductor and Triton believe that one GPU of this architecture exists."""
    arch = ARCHS[arch_name]
    properties = _properties(arch)
    interface = _interface(arch, properties)
    real_interface = device_interface.get_interface_for_device

    def get_interface(device: Any) -> Any:
        kind = device.type if isinstance(device, torch.device) else str(device).split(":")[0]
        return interface if kind == "cuda" else real_interface(device)

    cuda_answers: dict[str, Any] = {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_properties": properties,
        "get_device_capability": (arch.major, arch.minor),
        "get_device_name": arch.name,
        "_lazy_init": None,
        "is_tf32_supported": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "synchronize": None,
        "set_rng_state": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "set_device": None,
    }
    # torch only does this itself when cuda.is_available() is False; without it autograd aborts
    torch._C._ensureCUDADeviceGuardSet()
    with contextlib.ExitStack() as stack:

        def patch(owner: Any, name: str, value: Any, **kwargs: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value, **kwargs))

        for name, value in cuda_answers.items():
            patch(torch.cuda, name, lambda *args, _value=value, **kwargs: _value, create=True)
        patch(torch.cuda, "get_rng_state", lambda *args: torch.zeros(16, dtype=torch.uint8))
        patch(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True)
        patch(torch._C, "_cuda_getDevice", lambda: 0, create=True)
        patch(torch.version, "cuda", "13.0")
        patch(fake_tensor, "init_gpu_context", lambda device: None)
        by_value = {
            "has_triton": True,
            "has_triton_package": True,
            "get_gpu_shared_memory": arch.shared_memory,
            "get_max_num_sms": arch.processors,
            "is_big_gpu": True,
        }
        for name, module in list(sys.modules.items()):  # these functions are imported by value in many modules
            if not name.startswith("torch.") or module is None:
                continue
            if module.__dict__.get("get_interface_for_device") is real_interface:
                patch(module, "get_interface_for_device", get_interface)
            for function, value in by_value.items():
                if callable(module.__dict__.get(function)):
                    patch(module, function, functools.lru_cache(None)(lambda *args, _value=value: _value))
        create = hints.DeviceProperties.create
        patch(
            hints.DeviceProperties,
            "create",
            staticmethod(_device_properties(arch, getattr(create, "__wrapped__", create))),
        )
        for module in (joint_graph, post_grad):
            if hasattr(module, "lazy_init"):
                patch(module, "lazy_init", _without_cuda(module.lazy_init))
        previous = getattr(triton_driver, "_active", None)
        triton_driver.set_active(_triton_driver(arch))
        stack.callback(setattr, triton_driver, "_active", previous)
        yield arch


@contextlib.contextmanager
def _capture_code(codes: list[str]) -> Iterator[None]:
    """Stop each GraphLowering after code generation and keep its text."""

    def call(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(_STOP)

    def compile_to_module(self: GraphLowering, *args: Any, **kwargs: Any) -> Any:
        code, _ = self.codegen_with_cpp_wrapper() if self.cpp_wrapper else self.codegen()
        codes.append(code if isinstance(code, str) else code.value)
        return types.SimpleNamespace(
            __file__="<none>", key="none", cache_key="none", cache_linemap=[], cache_path="none", call=call
        )

    with mock.patch.object(GraphLowering, "compile_to_module", compile_to_module):
        yield


def _move_to_cuda(gm: torch.fx.GraphModule) -> Callable[[Any], Any]:
    """Move a traced graph from CPU fake tensors to CUDA ones: metadata and device constants only."""
    memo: dict[int, tuple[Any, Any]] = {}  # keeps the key alive, so that ids stay unique

    def move(x: Any) -> Any:
        if not isinstance(x, fake_tensor.FakeTensor) or x.device.type != "cpu":
            return x
        if id(x) not in memo:
            with x.fake_mode:
                memo[id(x)] = x, torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=_DEVICE)
        return memo[id(x)][1]

    def device_of(x: Any) -> Any:
        return _DEVICE if isinstance(x, torch.device) and x.type == "cpu" else x

    for node in gm.graph.nodes:
        for key in ("val", "example_value", "eager_input_vals"):
            if key in node.meta:
                node.meta[key] = torch.utils._pytree.tree_map(move, node.meta[key])
        node.args = torch.fx.node.map_aggregate(node.args, device_of)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, device_of)
    gm.recompile()
    return move


def lower(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    *,
    arch: str = "sm90",
    device: str = "cuda",
    dynamic: bool | None = None,
    **config: Any,
) -> Lowered:
    """Compile ``function`` for CPU ``inputs`` as if they were on CUDA and return the generated code.

    Inputs that require grad give a backward graph too.  ``config`` are torch._inductor.config settings.
    ``device="cpu"`` leaves the graphs on the CPU, to look at the code of the CPU path.
    """
    result = Lowered()

    def inner(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        result.graphs.append(gm)
        fake = fake_cuda(arch) if device == "cuda" else contextlib.nullcontext()
        with fake, _capture_code(result.codes):
            move = _move_to_cuda(gm) if device == "cuda" else (lambda x: x)
            return compile_fx_inner(gm, [move(x) for x in example_inputs], **kwargs)

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return compile_fx(gm, example_inputs, inner_compile=inner)

    settings = {"force_disable_caches": True, "compile_threads": 1, **config}
    torch._dynamo.reset()
    # the backward is lowered at once instead of when it is first run, because nothing runs here
    with (
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        inductor_config.patch(**settings),
    ):
        try:
            torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
        except RuntimeError as error:
            if _STOP not in str(error):
                raise
    return result
