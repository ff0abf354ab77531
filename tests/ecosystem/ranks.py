"""What one of two processes of ``test_distributed.py`` runs: ``python -m ecosystem.ranks RANK RENDEZVOUS RESULT``."""

from __future__ import annotations

import copy
import datetime
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import flash_inductor
from ecosystem.model import Model
from flash_inductor.report import collect

RANKS = 2


def ddp(model: nn.Module) -> Any:
    return torch.compile(DistributedDataParallel(model))


def fsdp(model: Model) -> Any:
    for layer in model.layers:
        layer.compile(fullgraph=True)
        fully_shard(layer)
    return fully_shard(model)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def compare(wrap: Any, rank: int) -> dict[str, Any]:
    """The largest differences from one process that has the whole batch and no compiler, and what was replaced."""
    torch.manual_seed(0)
    model, batch = Model(layers=1), torch.randn(2 * RANKS, 32, 32)
    alone = copy.deepcopy(model)
    expected = alone(batch)
    expected.square().mean().backward()
    mine = slice(2 * rank, 2 * rank + 2)
    torch._dynamo.reset()
    with collect() as sites:
        wrapped = wrap(model)  # kept: DDP's hooks die with it
        out = wrapped(batch[mine])
        out.square().mean().backward()  # both wrappers take the mean over the ranks
    grads = [
        (whole(p.grad) - q.grad).abs().max() / q.grad.abs().max()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True)
        if q.grad.abs().max() > 1e-6  # the gradient of the keys' bias is 0 but for rounding
    ]
    return {
        "out": (out - expected[mine]).abs().max().item(),
        "grads": max(x.item() for x in grads),
        "replaced": [s.replaced for s in sites],
    }


def main(rank: int, rendezvous: str, result: str) -> None:
    dist.init_process_group(
        "gloo", f"file://{rendezvous}", rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=120)
    )
    flash_inductor.enable()
    flash_inductor.set_config(flash_inductor.Config(strict=True))
    found = {wrap.__name__: compare(wrap, rank) for wrap in (ddp, fsdp)}
    torch.save(found, result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
