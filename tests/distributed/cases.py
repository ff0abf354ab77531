"""Context-parallel attention on each rank against the float64 reference of the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

import flash_inductor.distributed
from flash_inductor.distributed import ContextParallel
from flash_inductor.reference import attention_backward, attention_forward
from flash_inductor.spec import AttentionSpec, MaskSpec
from flash_inductor.testing import make_inputs


@dataclass(frozen=True)
class Case:
    layout: str = "zigzag"
    method: str = "ring"
    length: int = 48
    options: dict[str, Any] = field(default_factory=dict)
    memory: str = "bhnd"
    heads: int = 4
    kv_heads: int = 2
    v_head_dim: int | None = None
    dtype: torch.dtype = torch.float64
    with_lse: bool = True
    frozen: tuple[str, ...] = ()  # inputs that need no gradient
    compiled: str | None = None  # the backend


CAUSAL = {"is_causal": True}
WINDOW = {"is_causal": True, "window_size": (9, 0)}
BOTH_SIDES = {"window_size": (5, 3)}
BOTH = [(layout, method) for layout in ("zigzag", "contiguous") for method in ("ring", "gather")]
CASES = {
    **{f"causal-{a}-{b}": Case(a, b, options=CAUSAL) for a, b in BOTH},
    **{f"full-{a}-{b}": Case(a, b) for a, b in BOTH},
    **{f"window-{a}-{b}": Case(a, b, options=WINDOW) for a, b in BOTH},
    **{f"both_sides-{a}-{b}": Case(a, b, options=BOTH_SIDES) for a, b in BOTH},
    **{f"uneven-{a}-{b}": Case(a, b, length=53, options=CAUSAL) for a, b in BOTH},
    "wide_window-zigzag": Case(options={"window_size": (30, 17)}),
    "left_only-contiguous": Case("contiguous", options={"window_size": (4, None)}),
    "window_0": Case(options={"window_size": 0}),
    "softcap_scale": Case(options={**CAUSAL, "softcap": 3.0, "scale": 0.7}),
    "softcap_window_uneven": Case("contiguous", length=51, options={**WINDOW, "softcap": 3.0}),
    "one_kv_head": Case(options=CAUSAL, kv_heads=1),
    "all_kv_heads_bnhd": Case(options=CAUSAL, kv_heads=4, memory="bnhd"),
    "bnhd-gather": Case("contiguous", "gather", options=WINDOW, memory="bnhd"),
    "value_dim": Case(options=CAUSAL, v_head_dim=24),
    "without_lse": Case(options=CAUSAL, with_lse=False),
    "frozen_key": Case(options=CAUSAL, frozen=("key",)),
    "frozen_key_value": Case(options=CAUSAL, frozen=("key", "value")),
    "frozen_query": Case("contiguous", "gather", options=CAUSAL, frozen=("query",)),
    "auto": Case(method="auto", options=CAUSAL),
    "float32": Case(options=CAUSAL, dtype=torch.float32),
    "bfloat16": Case(options=CAUSAL, dtype=torch.bfloat16),
    "compiled-ring": Case(options=WINDOW, compiled="inductor"),
    "compiled-gather": Case("contiguous", "gather", options={**CAUSAL, "softcap": 3.0}, compiled="aot_eager"),
}
NAMES = ("query", "key", "value")


def spec_of(options: dict[str, Any]) -> AttentionSpec:
    window = options.get("window_size")
    left, right = window if isinstance(window, tuple) else (window, window)
    band = MaskSpec.from_window(options.get("is_causal", False), left, right)
    return AttentionSpec(options.get("scale"), band, options.get("softcap"))


def whole_inputs(case: Case, seed: int) -> tuple[Tensor, ...]:
    return make_inputs(
        case.memory, heads=case.heads, kv_heads=case.kv_heads, q_len=case.length, v_head_dim=case.v_head_dim,
        dtype=case.dtype, seed=seed,
    )  # fmt: skip


def expected(case: Case, inputs: tuple[Tensor, ...], grads: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    spec = spec_of(case.options)
    out, lse = attention_forward(*inputs, spec)
    found = attention_backward(grads[0], grads[1] if case.with_lse else None, *inputs, spec)
    return {"out": out, "lse": lse, **dict(zip(NAMES, found, strict=False))}


def run_case(case: Case, seed: int, repeat: bool = False) -> dict[str, float]:
    """The largest difference of this rank's rows, relative to the largest value."""
    inputs = whole_inputs(case, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    rows = (*inputs[0].shape[:3],)
    grads = (
        torch.randn(*rows, inputs[2].shape[3], generator=generator).to(case.dtype),
        torch.randn(*rows, generator=generator).to(torch.float64 if case.dtype is torch.float64 else torch.float32),
    )
    wanted = expected(case, inputs, grads)
    context = ContextParallel(layout=case.layout, method=case.method)
    parts = [context.shard(x, 2).detach() for x in inputs]
    if case.memory == "bnhd":
        parts = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts]
    for name, x in zip(NAMES, parts, strict=True):
        x.requires_grad_(name not in case.frozen)

    def function(*parts: Tensor) -> tuple[Tensor, Tensor]:
        # Something before and after, so that there is a graph around the op.
        return context.attention(parts[0] * 1, *parts[1:], length=case.length, return_lse=True, **case.options)

    call = torch.compile(function, fullgraph=True, backend=case.compiled) if case.compiled else function
    out, lse = call(*parts)
    of_rows = [context.shard(x, 2) for x in grads]
    torch.autograd.backward([out, lse] if case.with_lse else [out], of_rows if case.with_lse else of_rows[:1])
    found = {"out": out, "lse": lse, **{name: x.grad for name, x in zip(NAMES, parts, strict=True)}}
    differences = {}
    for name, whole in wanted.items():
        if name in case.frozen:
            assert found[name] is None, f"{name} has a gradient that nobody asked for"
            continue
        x = found[name]
        part = context.shard(whole, 2)
        assert x.shape == part.shape
        if name not in ("out", "lse"):
            assert x.dtype == case.dtype
        difference = (x.detach().double() - part).abs().nan_to_num(0.0 if name == "lse" else torch.inf)
        differences[name] = (difference.max() / whole.abs().max().clamp(min=1e-9)).item()
    if case.memory == "bnhd":
        assert out.transpose(1, 2).is_contiguous()
    return differences


def run_all(seed: int, names: list[str]) -> dict[str, Any]:
    """Each case, and one of them twice: the same bits."""
    flash_inductor.distributed  # noqa: B018 - used by name in the cases
    return {name: run_case(CASES[name], seed) for name in names}


def repeats(seed: int) -> bool:
    """Whether two runs of one case give the same bits."""
    case = CASES["causal-zigzag-ring"]
    inputs = [x.float() for x in whole_inputs(case, seed)]
    context = ContextParallel()
    runs = []
    for _ in range(2):
        parts = [context.shard(x, 2).detach().requires_grad_() for x in inputs]
        out = context.attention(*parts, is_causal=True)
        out.square().sum().backward()
        runs.append([out.detach(), *(x.grad for x in parts)])
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def unsharded(seed: int) -> bool:
    """Whether the parts of all ranks give the whole again, in both layouts."""
    x = torch.randn(2, 53, 3, generator=torch.Generator().manual_seed(seed))
    for layout in ("zigzag", "contiguous"):
        context = ContextParallel(dist.group.WORLD, layout=layout)
        if not torch.equal(context.unshard(context.shard(x, 1), 1, 53), x):
            return False
        if not torch.equal(x[:, context.positions(53)], context.shard(x, 1)):
            return False
    return True


def inside_torchs_context(seed: int) -> bool:
    """Whether shards that torch's context_parallel makes are those of the zigzag layout, and attention right."""
    case = Case(length=16 * dist.get_world_size())
    whole = [x.detach() for x in whole_inputs(case, seed)]
    expected = attention_forward(*whole, spec_of(CAUSAL))[0]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    context = ContextParallel(mesh)
    buffers = [x.clone() for x in whole]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
        same = all(torch.equal(x, context.shard(y, 2)) for x, y in zip(buffers, whole, strict=True))
        out = context.attention(*buffers, is_causal=True)
    return same and torch.allclose(out, context.shard(expected, 2))
