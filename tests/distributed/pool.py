"""Ranks as processes of this machine, forked from a process that has imported torch once for all of them."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 300  # for all that the ranks of a call do
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch._inductor.compile_fx", "torch.distributed.tensor", "flash_inductor.distributed", "distributed.pool"]
)


def run(ranks: int, function: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """What ``function(*args)`` returns on each rank of a gloo group, or the exception it raised there.

    Raises AssertionError if a rank neither returns nor raises.
    """
    folder.mkdir(exist_ok=True, parents=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    processes = [
        _context.Process(target=_rank, args=(rank, ranks, str(folder), function, args), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(SECONDS)
            assert not process.is_alive(), f"a rank hangs; {[p.exitcode for p in processes]}"
    finally:
        for process in processes:
            process.kill()
            process.join()
    import torch

    results = []
    for rank, process in enumerate(processes):
        path = folder / f"{rank}.pt"
        results.append(torch.load(path, weights_only=False) if path.exists() else process.exitcode)
    return results


def _rank(rank: int, ranks: int, folder: str, function: Callable[..., Any], args: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"  # shared: the ranks compile the same
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=SECONDS)
    )
    try:
        found: Any = function(*args)
    except Exception as error:
        found = Failure(type(error).__name__, str(error), traceback.format_exc())
    torch.save(found, f"{folder}/{rank}.part")
    os.replace(f"{folder}/{rank}.part", f"{folder}/{rank}.pt")
    if not isinstance(found, Failure):
        dist.barrier()  # nobody leaves while others still talk to it
        dist.destroy_process_group()


class Failure:
    """An exception of a rank."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        self.kind = kind
        self.message = message
        self.trace = trace

    def __repr__(self) -> str:
        return self.trace
