"""Context-parallel attention, DTensors and a failing rank with NCCL on two GPUs.

pytest -m gpu tests/gpu/test_distributed.py
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

RANKS = 2
SECONDS = 300
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} CUDA devices"),
]
CASES = {
    "causal-ring": ("zigzag", "ring", 4096, {"is_causal": True}),
    "causal-gather": ("zigzag", "gather", 4096, {"is_causal": True}),
    "window-ring": ("contiguous", "ring", 4096, {"is_causal": True, "window_size": (511, 0)}),
    "softcap-uneven": ("zigzag", "ring", 3001, {"is_causal": True, "softcap": 20.0}),
    "both_sides": ("contiguous", "gather", 2048, {"window_size": (100, 60)}),
}


def start(function: Any, folder: Path, timeout: float) -> list[Any]:
    """What the function returns or raises on each rank."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=enter, args=(rank, str(folder), timeout, function)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(SECONDS)
            assert not process.is_alive(), "a rank hangs"
    finally:
        for process in processes:
            process.kill()
            process.join()
    paths = [folder / f"{rank}.pt" for rank in range(RANKS)]
    pairs = zip(paths, processes, strict=True)
    return [torch.load(path, weights_only=False) if path.exists() else process.exitcode for path, process in pairs]


def enter(rank: int, folder: str, timeout: float, function: Any) -> None:
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS,
        timeout=datetime.timedelta(seconds=timeout), device_id=torch.device("cuda", rank),
    )  # fmt: skip
    try:
        found = function(rank)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    torch.save(found, f"{folder}/{rank}.pt")
    if not isinstance(found, str):
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # without waiting for what a failed rank never answers


def compare(rank: int) -> dict[str, Any]:
    """Distances from the op on one GPU, relative to norms; eager, and compiled once."""
    import flash_inductor
    from flash_inductor.distributed import ContextParallel

    results: dict[str, Any] = {}
    for name, (layout, method, length, options) in CASES.items():
        torch.manual_seed(len(name))
        whole = [torch.randn(1, n, length, 128, device="cuda", dtype=torch.bfloat16) for n in (8, 2, 2, 8)]
        leaves = [x.clone().requires_grad_() for x in whole[:3]]
        out = flash_inductor.attention(*leaves, **options)
        out.backward(whole[3])
        context = ContextParallel(layout=layout, method=method)

        def attend(q: Any, k: Any, v: Any, context: Any = context, length: int = length, options: Any = options) -> Any:
            return context.attention(q * 1, k, v, length=length, **options)

        for compiled in (False, True) if name == "causal-ring" else (False,):
            parts = [context.shard(x, 2).detach().clone().requires_grad_() for x in whole[:3]]
            found = (torch.compile(attend, fullgraph=True) if compiled else attend)(*parts)
            found.backward(context.shard(whole[3], 2))
            pairs = [(found, out), *((p.grad, x.grad) for p, x in zip(parts, leaves, strict=True))]
            results[f"{name}-compiled" if compiled else name] = [
                ((a.double() - (b := context.shard(w, 2).double())).norm() / b.norm()).item() for a, w in pairs
            ]
    return results


def split_by_heads(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import flash_inductor

    mesh = init_device_mesh("cuda", (RANKS,))
    torch.manual_seed(0)
    whole = [torch.randn(2, n, 512, 64, device="cuda", dtype=torch.bfloat16) for n in (8, 4, 4)]
    expected = flash_inductor.attention(*whole, is_causal=True)
    parts = [distribute_tensor(x, mesh, [Shard(1)]).requires_grad_() for x in whole]
    out = flash_inductor.attention(*parts, is_causal=True)
    out.to_local().float().sum().backward()
    assert parts[1].grad is not None and parts[1].grad.placements == (Shard(1),)  # type: ignore[attr-defined]
    return {"equal": torch.equal(out.full_tensor(), expected)}  # type: ignore[attr-defined]


def never_comes(rank: int) -> None:
    from flash_inductor.distributed import ContextParallel

    context = ContextParallel()
    inputs = [torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    context.attention(*inputs, is_causal=True)  # the ranks know each other now
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(40)
        return
    context.attention(*inputs, is_causal=True)
    torch.cuda.synchronize()


def test_two_gpus_compute_what_one_does(tmp_path: Path) -> None:
    for rank in start(compare, tmp_path, 120):
        assert isinstance(rank, dict), rank
        assert set(rank) == {*CASES, "causal-ring-compiled"}
        for name, distances in rank.items():
            assert max(distances) < 1e-2, name


def test_dtensors_split_by_heads_are_bit_for_bit_the_whole(tmp_path: Path) -> None:
    assert start(split_by_heads, tmp_path, 120) == [{"equal": True}] * RANKS


def test_a_rank_that_never_comes_is_an_error_and_no_hang(tmp_path: Path) -> None:
    """NCCL's watchdog raises or ends the process after the group's timeout."""
    found = start(never_comes, tmp_path, 10)
    assert found[0] is not None, found
