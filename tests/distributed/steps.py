"""A training step of a split model on each rank, against the same step of one process without a compiler."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import flash_inductor
from flash_inductor.matching.fusion_pass import graphs_of, rewrite_or_leave
from flash_inductor.report import collect

from .models import Decoder, explicit, loss_of, split, tokens_of, whole

BATCH, LENGTH = 4, 24


def rewritten(gm: Any, inputs: Any) -> Any:
    """A backend that rewrites as the plugin does, and then runs AOTAutograd's graphs: quicker than Inductor."""
    for graph, outer in graphs_of(gm):
        rewrite_or_leave(graph, outer=outer)
        graph.owning_module.recompile()
    return lookup_backend("aot_eager")(gm, inputs)


def collectives(events: Any) -> dict[str, int]:
    """How often each collective ran."""
    kinds = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast")
    names = [e.name.split("::")[1] for e in events if e.name.startswith(("_c10d_functional::", "c10d::"))]
    return dict(Counter(kind for name in names for kind in kinds if kind in name))


def step(model: Any, tokens: Any, targets: Any, *, counted: bool = False) -> tuple[Any, list[Any], dict[str, int]]:
    """Loss, gradients, collectives."""
    found: dict[str, int] = {}
    for attempt in range(2 if counted else 1):  # the first compiles
        model.zero_grad()
        if attempt:
            with profile(activities=[ProfilerActivity.CPU]) as events:
                loss = loss_of(model(tokens), targets)
                loss.backward()
            found = collectives(events.events())
        else:
            loss = loss_of(model(tokens), targets)
            loss.backward()
    return loss.detach(), [whole(p.grad) for p in model.parameters()], found


def compare(found: Any, expected: Any) -> dict[str, float]:
    pairs = zip(found[1], expected[1], strict=True)
    return {
        "loss": abs(found[0] - expected[0]).item(),
        "grads": max(((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).item() for a, b in pairs),
    }


def replaced(sites: Any) -> list[bool]:
    return [site.replaced for site in sites]


def tensor_parallel(backend: Any, *, sequence: bool = False, attend: Any = None, local: bool = True) -> Any:
    """All of the batch on each rank, a share of the heads."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Decoder(**({} if attend is None else {"attend": attend}))
    tokens, targets = tokens_of(BATCH, LENGTH, 1)
    expected = step(model, tokens, targets)
    counts: dict[str, Any] = {}
    # Stock first: its SDPA takes no DTensors on the CPU.
    for name, chosen in [
        *([("stock", "aot_eager")] if backend == rewritten and attend is None else []),
        ("plugin", backend),
    ]:
        torch._dynamo.reset()
        part = split(copy.deepcopy(model), mesh, sequence=sequence, local=local)
        compiled = part.layers[0].attention if chosen == INDUCTOR else part  # a small graph: Inductor takes its time
        compiled.compile(fullgraph=True, backend=chosen)
        with collect() as sites:
            *found, counts[name] = step(part, tokens, targets, counted=True)
    return {"counts": counts, **compare(found, expected), "replaced": [site.replaced for site in sites]}


def data_parallel(wrap: Any) -> Any:
    """A share of the batch on each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Decoder(layers=2)
    tokens, targets = tokens_of(BATCH, LENGTH, 2)
    expected = step(model, tokens, targets)
    mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    torch._dynamo.reset()
    with collect() as sites:
        wrapped = wrap(copy.deepcopy(model))
        loss, grads, _ = step(wrapped, tokens[mine], targets[mine])
    dist.all_reduce(loss, dist.ReduceOp.SUM)
    return {**compare((loss / ranks, grads), expected), "replaced": [site.replaced for site in sites]}


class Checkpointed(nn.Module):
    """A layer whose activations the backward computes again, by torch.utils.checkpoint."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return checkpoint(self.layer, x, use_reentrant=False)


def ddp(model: Any, around: Any, backend: Any) -> Any:
    for i, layer in enumerate(model.layers):
        model.layers[i] = around(layer)
    return torch.compile(DistributedDataParallel(model), backend=backend)


def fsdp(model: Any, around: Any, backend: Any) -> Any:
    for i, layer in enumerate(model.layers):
        model.layers[i] = around(layer)
        model.layers[i].compile(backend=backend)
        fully_shard(model.layers[i])
    return fully_shard(model)


def checkpointed(wrap: Any, around: Any, backend: Any) -> Any:
    return data_parallel(partial(wrap, around=around, backend=backend))


INDUCTOR = "flash_inductor"
CASES: dict[str, Any] = {
    "tensor_parallel": partial(tensor_parallel, rewritten),
    "tensor_parallel_inductor": partial(tensor_parallel, INDUCTOR),
    "tensor_and_sequence_parallel": partial(tensor_parallel, rewritten, sequence=True),
    "tensor_parallel_dtensor": partial(tensor_parallel, rewritten, attend=explicit, local=False),
    "fsdp_checkpoint": partial(checkpointed, fsdp, Checkpointed, rewritten),
    "ddp_checkpoint_wrapper": partial(checkpointed, ddp, checkpoint_wrapper, rewritten),
}


def run_all(names: list[str]) -> dict[str, Any]:
    flash_inductor.set_config(flash_inductor.Config(strict=True))
    return {name: CASES[name]() for name in names}
