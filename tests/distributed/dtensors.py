"""The op on DTensors, on each rank against the float64 reference of the whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from flash_inductor.ops import attn
from flash_inductor.ops.extras import EXTRAS
from flash_inductor.reference import attention_backward, attention_forward
from flash_inductor.spec import AttentionSpec, MaskSpec

BATCH, HEADS, LENGTH, DIM = 4, 4, 20, 8


BY_HEADS = Shard(1)


@dataclass(frozen=True)
class Case:
    query: Any = BY_HEADS
    keys: Any = None  # as the query
    kv_heads: int = 2
    batch: int = BATCH
    extras: dict[str, Any] = field(default_factory=dict)  # shape and placement by name


CASES = {
    "batch": Case(Shard(0)),
    "uneven_batch": Case(Shard(0), batch=3),
    "batch_of_one": Case(Shard(0), batch=1),
    "heads": Case(),
    "replicated": Case(Replicate()),
    "one_kv_head": Case(keys=Replicate(), kv_heads=1),
    "replicated_keys": Case(keys=Replicate()),
    "replicated_query": Case(Replicate(), keys=Shard(1)),
    "bias_of_heads": Case(extras={"bias": ((1, HEADS, LENGTH, LENGTH), Shard(1))}),
    "bias_of_heads_replicated": Case(extras={"bias": ((1, HEADS, LENGTH, LENGTH), Replicate())}),
    "bias_shared_by_heads": Case(extras={"bias": ((BATCH, 1, LENGTH, LENGTH), Replicate())}),
    "bias_shared_by_batch": Case(Shard(0), extras={"bias": ((1, HEADS, LENGTH, LENGTH), Replicate())}),
    "mask_of_batch": Case(Shard(0), extras={"mask": ((BATCH, 1, 1, LENGTH), Shard(0))}),
    "mask_shared": Case(extras={"mask": ((BATCH, 1, LENGTH, LENGTH), Replicate())}),
    "segments": Case(
        Shard(0), extras={name: ((BATCH, LENGTH), Shard(0)) for name in ("query_segments", "key_segments")}
    ),
    "segments_shared": Case(extras={name: ((1, LENGTH), Replicate()) for name in ("query_segments", "key_segments")}),
    "sinks_of_heads": Case(extras={"sinks": ((HEADS,), Shard(0))}),
    "sinks_of_batch": Case(Shard(0), extras={"sinks": ((HEADS,), Replicate())}),
}
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "length": (Shard(2), {}, "query: expected Shard(0) (batch), Shard(1) (heads), Replicate or Partial"),
    "dropout": (Shard(1), {"dropout_p": 0.5}, "dropout_p: expected 0 for DTensors that are split over ranks"),
    "odd_heads": (Shard(1), {"kv_heads": 3, "heads": 9}, "query: expected heads that 2 ranks can share"),
    "plain_bias": (Shard(1), {"bias": torch.zeros(1, 1, LENGTH, LENGTH)}, "bias: expected a DTensor"),
    "plain_key": (Shard(1), {"plain": "key"}, "key: expected a DTensor"),
}


def make_extra(name: str, shape: Any, generator: torch.Generator) -> Tensor:
    if name == "mask":
        return torch.rand(shape, generator=generator) < 0.7
    if name.endswith("segments"):
        return torch.arange(shape[1]).div(7, rounding_mode="floor").int().expand(shape).contiguous()
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def run_case(case: Case, seed: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(seed)

    def rand(heads: int) -> Tensor:
        return torch.randn(case.batch, heads, LENGTH, DIM, generator=generator, dtype=torch.float64)

    inputs = {"query": rand(HEADS), "key": rand(case.kv_heads), "value": rand(case.kv_heads)}
    extras = {name: make_extra(name, shape, generator) for name, (shape, _) in case.extras.items()}
    grad_out, grad_lse = rand(HEADS), rand(HEADS)[..., 0]
    spec = AttentionSpec(mask=MaskSpec(upper=0))
    out, lse = attention_forward(*inputs.values(), spec, **extras)
    grads = attention_backward(grad_out, grad_lse, *inputs.values(), spec, **extras)
    expected = {"out": out, "lse": lse, **dict(zip(("query", "key", "value", "bias", "sinks"), grads, strict=True))}

    places = {"query": case.query, "key": case.keys or case.query, "value": case.keys or case.query}
    places |= {name: place for name, (_, place) in case.extras.items()}
    parts = {name: distribute_tensor(x, mesh, [places[name]]) for name, x in {**inputs, **extras}.items()}
    for x in parts.values():
        x.requires_grad_(x.is_floating_point())
    with CommDebugMode() as sent:
        found = attn(
            parts["query"], parts["key"], parts["value"], *(parts.get(name) for name in EXTRAS), is_causal=True
        )
        rows = [distribute_tensor(x, mesh, found[0].placements) for x in (grad_out, grad_lse)]
        before = sent.get_total_counts()
        torch.autograd.backward(list(found), rows)
        after = sent.get_total_counts()
    results = {"out": found[0], "lse": found[1], **{name: x.grad for name, x in parts.items()}}
    differences = {
        name: (results[name].full_tensor().detach() - x).abs().nan_to_num(0).max().item()
        for name, x in expected.items()
        if x is not None
    }
    scattered = 2 if isinstance(found[0].placements[0], Shard) else 0  # distribute_tensor's own, of the two gradients
    return {
        "differences": differences,
        "sent": [before - scattered if scattered else 0, after - before],
        "partial": sorted(
            n for n, x in parts.items() if x.grad is not None and isinstance(x.grad.placements[0], Partial)
        ),
    }


def refusal(placement: Any, options: dict[str, Any]) -> str:
    """The error of a call."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options = dict(options)
    heads, kv_heads = options.pop("heads", 4), options.pop("kv_heads", 2)
    plain, bias = options.pop("plain", None), options.pop("bias", None)
    rng = torch.zeros(2, dtype=torch.int64) if "dropout_p" in options else None
    inputs: dict[str, Any] = {
        name: distribute_tensor(torch.randn(2, n, LENGTH, DIM), mesh, [placement])
        for name, n in (("query", heads), ("key", kv_heads), ("value", kv_heads))
    }
    if plain:
        inputs[plain] = inputs[plain].full_tensor()
    if rng is not None:
        rng = DTensor.from_local(rng, mesh, [Replicate()], run_check=False)
    try:
        attn(*inputs.values(), bias, None, None, None, None, rng, **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    return "no error"


def run_all(seed: int) -> dict[str, Any]:
    return {
        "cases": {name: run_case(case, seed) for name, case in CASES.items()},
        "refused": {name: refusal(placement, options) for name, (placement, options, _) in REFUSED.items()},
    }
