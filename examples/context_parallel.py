"""Train on a sequence that is too long for one GPU: each rank holds a part of it.

    torchrun --standalone --nproc-per-node 2 examples/context_parallel.py

Parameters are replicated and their gradients averaged by DDP (fully_shard works alike).  The first step is compared
with the same step on one rank that has the whole sequence.  Without torchrun there is one rank.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import flash_inductor
from flash_inductor.distributed import ContextParallel

VOCABULARY = 64


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding: it needs each token's place in the whole sequence, which is not its place on the rank."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = positions.unsqueeze(1) * frequency
    a, b = x.float().split(half, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).to(x.dtype)


class Layer(nn.Module):
    """Pre-norm attention, with grouped heads and an optional window, and MLP."""

    def __init__(self, dim: int, heads: int, kv_heads: int, window: int | None) -> None:
        super().__init__()
        self.head_dim, self.heads, self.kv_heads = dim // heads, heads, kv_heads
        self.window = None if window is None else (window - 1, 0)
        self.norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, positions: Tensor, context: ContextParallel | None) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        q, k = rotate(q, positions), rotate(k, positions)
        if context is None:
            attended = flash_inductor.attention(q, k, v, is_causal=True, window_size=self.window)
        else:  # the only line that differs
            attended = context.attention(q, k, v, is_causal=True, window_size=self.window)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Tokens [batch, positions of this rank] to the mean loss over them."""

    def __init__(self, dim: int, window: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Layer(dim, 4, 2, w) for w in (window, None))
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor, context: ContextParallel | None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, context)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--length", type=int, default=32768 if cuda else 256, help="of the whole sequence")
    parser.add_argument("--dim", type=int, default=512 if cuda else 32)
    parser.add_argument("--window", type=int, default=4096 if cuda else 48)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=cuda)
    args = parser.parse_args(arguments)

    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group(backend)
    else:
        meet = os.path.join(tempfile.mkdtemp(), "meet")
        dist.init_process_group(backend, init_method=f"file://{meet}", rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("context",))
    context = ContextParallel(mesh["context"])

    torch.manual_seed(0)  # the same weights and data on each rank
    model = Model(args.dim, args.window).to(device)
    alone = Model(args.dim, args.window).to(device)
    alone.load_state_dict(model.state_dict())
    if args.compile:
        model.compile(fullgraph=True)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-3)

    # Something to learn: each token repeats one of a while ago.
    whole = torch.randint(VOCABULARY, (1, 24), device=device).repeat(1, args.length // 24 + 2)[:, : args.length + 1]
    tokens, targets = whole[:, :-1], whole[:, 1:]
    positions = torch.arange(args.length, device=device)
    part = [context.shard(x, dim=-1) for x in (tokens, targets, positions)]

    for step in range(args.steps):
        loss = parallel(*part, context)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            expected = alone(tokens, targets, positions, None)
            expected.backward()
            far = max(
                ((p.grad - q.grad).norm() / q.grad.norm()).item()
                for p, q in zip(model.parameters(), alone.parameters(), strict=True)
            )
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean /= context.ranks
        if step == 0:
            far = max(far, abs(mean.item() / expected.item() - 1))
        if context.rank == 0:
            print(f"step {step}: loss {mean.item():.5f}")
    same = far < (1e-2 if cuda else 1e-4)
    if context.rank == 0:
        words = "equal within rounding" if same else "NOT EQUAL"
        print(f"first step on {context.ranks} ranks and on one, loss and gradients: {words} ({far:.1e})")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
