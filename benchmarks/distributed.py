"""Context-parallel attention: strong scaling from one GPU to several, against torch's own context_parallel.

    python benchmarks/distributed.py                              1 and 2 GPUs, 64k to 256k positions, bf16
    python benchmarks/distributed.py --ranks 1,2,4 --lengths 65536
    python benchmarks/distributed.py --device cpu --tiny          the same code on gloo, with toy sizes

One command starts all processes.  Every implementation is first compared with the op on one GPU at the shortest length.
A cell is a length, a band, an implementation and a number of ranks; it is a forward, and a forward with its backward,
timed by events between barriers: the median over repetitions of the slowest rank.  "hidden" is the part of the time of
NCCL's kernels during which another kernel ran too, from a trace of one forward and backward.  A cell that fails says so
and the others go on.  Results go to benchmarks/results/: JSON, and a table as text.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import flash_inductor
from flash_inductor.distributed import ContextParallel, Problem, Sequence, cost, make_plan
from flash_inductor.distributed.cost import machine_of
from flash_inductor.spec import MaskSpec

RESULTS = Path(__file__).parent / "results"
BANDS = ("causal", "window")
OURS = ("ring", "gather")
# torch's own: kernel and how keys travel.  It has no windows.
TORCH = {
    "torch-cudnn-gather": (SDPBackend.CUDNN_ATTENTION, "allgather"),
    "torch-cudnn-alltoall": (SDPBackend.CUDNN_ATTENTION, "alltoall"),
    "torch-flash-gather": (SDPBackend.FLASH_ATTENTION, "allgather"),
}
REPEATED = {f"{name}-mha": how for name, how in TORCH.items()}  # with the key heads repeated: its ring may need that
ONE = ("op", "sdpa")  # on one rank


@dataclass
class Cell:
    """What one implementation did; ``error`` is set if it failed."""

    ranks: int
    length: int
    band: str
    impl: str
    forward_ms: float | None = None
    both_ms: float | None = None  # forward and backward
    tflops: float | None = None  # of both, per rank
    modelled_forward_ms: float | None = None
    sent_gb: float | None = None  # by rank 0, both
    hidden: float | None = None
    peak_gib: float | None = None
    differences: dict[str, float] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Bench:
    """The arguments, and what follows from them on one rank."""

    args: argparse.Namespace
    rank: int
    ranks: int

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.rank) if self.args.device == "cuda" else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.args.device == "cuda" else torch.float32

    def layout(self, band: str) -> str:
        return "zigzag" if band == "causal" else "contiguous"

    def options(self, band: str) -> dict[str, Any]:
        window = {"window_size": (self.args.window - 1, 0)} if band == "window" else {}
        return {"is_causal": True, **window}

    def sequence(self, length: int, band: str) -> Sequence:
        lower = 1 - self.args.window if band == "window" else None
        return Sequence(length, self.ranks, self.layout(band), MaskSpec(lower, 0))

    def problem(self) -> Problem:
        a = self.args
        return Problem(a.batch, a.heads, a.kv_heads, a.head_dim, a.head_dim, self.dtype.itemsize)

    def inputs(self, length: int) -> tuple[Tensor, ...]:
        """query, key, value and the output's gradient of the whole sequence, the same on all ranks."""
        generator = torch.Generator(self.device).manual_seed(length)
        heads = (self.args.heads, self.args.kv_heads, self.args.kv_heads, self.args.heads)
        shapes = [(self.args.batch, n, length, self.args.head_dim) for n in heads]
        return tuple(torch.randn(s, generator=generator, device=self.device, dtype=self.dtype) for s in shapes)

    @contextmanager
    def function(self, impl: str, length: int, band: str) -> Iterator[Callable[..., Tensor]]:
        """Attention of this rank's rows."""
        options = self.options(band)
        if impl in ONE and self.ranks > 1:
            raise ValueError(f"{impl} runs on one rank")
        if impl == "op":
            yield lambda q, k, v: flash_inductor.attention(q, k, v, **options)
        elif impl in OURS:
            context = ContextParallel(layout=self.layout(band), method=impl)
            yield lambda q, k, v: context.attention(q, k, v, length=length, **options)
        elif impl == "sdpa":
            yield lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            from torch.distributed.tensor.experimental import context_parallel
            from torch.distributed.tensor.experimental._attention import set_rotate_method

            backend, rotate = (TORCH | REPEATED)[impl]
            set_rotate_method(rotate)
            mesh = init_device_mesh(self.args.device, (self.ranks,))
            buffer = torch.zeros(length, device=self.device)  # it asks for one, to know the length
            with sdpa_kernel(backend), context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]):
                groups = self.args.heads // self.args.kv_heads

                def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                    if impl in REPEATED:
                        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=impl in TORCH)

                yield call

    def share(self, whole: tuple[Tensor, ...], band: str) -> list[Tensor]:
        """This rank's rows; query, key and value require gradients."""
        context = ContextParallel(layout=self.layout(band))
        parts = [context.shard(x, 2).detach().clone() for x in whole]
        return [x.requires_grad_(i < 3) for i, x in enumerate(parts)]

    def check(self, impl: str, length: int, band: str) -> dict[str, float]:
        """Distances from the op on one rank, relative to the norms of what it gives."""
        whole = self.inputs(length)
        leaves = [x.clone().requires_grad_() for x in whole[:3]]
        out = flash_inductor.attention(*leaves, **self.options(band))
        out.backward(whole[3])
        parts = self.share(whole, band)
        with self.function(impl, length, band) as function:
            found = function(*parts[:3])
            found.backward(parts[3])
        context = ContextParallel(layout=self.layout(band))
        pairs = {"out": (found, out), **{n: (p.grad, x.grad) for n, p, x in zip("qkv", parts, leaves, strict=False)}}
        return {
            name: ((a.double() - (b := context.shard(whole_b, 2).double())).norm() / b.norm()).item()
            for name, (a, whole_b) in pairs.items()
        }

    def measure(self, cell: Cell) -> None:
        """Fill in the times, and what the plan says of them."""
        parts = self.share(self.inputs(cell.length), cell.band)
        plan = None
        if cell.impl in OURS:
            plan = make_plan(self.sequence(cell.length, cell.band), 0, cell.impl)
            model = cost(plan, self.problem(), machine_of(self.args.device, self.ranks))
            cell.modelled_forward_ms = model.forward_seconds * 1e3
            cell.sent_gb = (model.forward_bytes + model.backward_bytes) / 1e9
        with self.function(cell.impl, cell.length, cell.band) as function:

            def forward() -> None:
                with torch.no_grad():
                    function(*parts[:3])

            def both() -> None:
                function(*parts[:3]).backward(parts[3])
                for x in parts[:3]:
                    x.grad = None

            if self.args.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            cell.both_ms = self.time(both)
            cell.forward_ms = self.time(forward)
            if self.args.device == "cuda":
                cell.peak_gib = torch.cuda.max_memory_allocated() / 2**30
                if self.ranks > 1:
                    cell.hidden = hidden(both)
        pairs = make_plan(Sequence(cell.length, 1, "contiguous", self.sequence(cell.length, cell.band).band), 0, "ring")
        cell.tflops = 3.5 * self.problem().flops(pairs.pairs) / self.ranks / cell.both_ms / 1e9

    def time(self, function: Callable[[], None]) -> float:
        """Milliseconds of the slowest rank, the median."""
        found = []
        for i in range(self.args.repeat + self.args.warmup):
            self.synchronize()
            start = time.perf_counter()
            function()
            if self.args.device == "cuda":
                torch.cuda.synchronize()
            if i >= self.args.warmup:
                found.append((time.perf_counter() - start) * 1e3)
        slowest = torch.tensor(found, device=self.device, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return statistics.median(slowest.tolist())

    def synchronize(self) -> None:
        if self.args.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        if self.args.device == "cuda":
            torch.cuda.synchronize()


def hidden(function: Callable[[], None]) -> float | None:
    """Which part of the time of NCCL's kernels another kernel was running, from a trace of one call."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        function()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/trace.json"
        trace.export_chrome_trace(path)
        events = json.loads(Path(path).read_text())["traceEvents"]
    return hidden_part([e for e in events if e.get("cat") == "kernel"])


def hidden_part(kernels: list[dict[str, Any]]) -> float | None:
    """The same from a trace's kernels (``name``, ``ts`` and ``dur`` in microseconds); None if none is NCCL's."""
    spans = [(e["ts"], e["ts"] + e["dur"], "nccl" in e["name"].lower()) for e in kernels]
    computing = sorted((start, stop) for start, stop, is_nccl in spans if not is_nccl)
    merged: list[list[float]] = []
    for start, stop in computing:
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    total = covered = 0.0
    for start, stop, is_nccl in spans:
        if is_nccl:
            total += stop - start
            covered += sum(max(0.0, min(stop, b) - max(start, a)) for a, b in merged)
    return covered / total if total else None


def work(rank: int, ranks: int, folder: str, args: argparse.Namespace) -> None:
    """All cells of one number of ranks; rank 0 writes them down."""
    bench = Bench(args, rank, ranks)
    if args.device == "cuda":
        torch.cuda.set_device(rank)
        # A transfer that starts together with attention must get its few multiprocessors before attention has all.
        options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        group: dict[str, Any] = {"backend": "nccl", "pg_options": options, "device_id": bench.device}
    else:
        torch.set_num_threads(1)
        group = {"backend": "gloo"}
    group["timeout"] = datetime.timedelta(seconds=120)
    dist.init_process_group(init_method=f"file://{folder}/meet{ranks}", rank=rank, world_size=ranks, **group)
    cells = []
    for length in args.lengths:
        for band in args.bands:
            impls = (*OURS, *TORCH, *REPEATED) if ranks > 1 else (*ONE, "ring")
            for impl in impls if band == "causal" else [x for x in impls if x in (*OURS, "op")]:
                cell = Cell(ranks, length, band, impl)
                try:
                    if length == min(args.lengths) and impl not in ONE:
                        cell.differences = bench.check(impl, length, band)
                        worst = max(cell.differences.values())
                        if not worst < args.tolerance:
                            raise ArithmeticError(f"differs from one rank by {worst:.1e}")
                    bench.measure(cell)
                except Exception as error:
                    cell.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
                cells.append(cell)
                if rank == 0:
                    Path(f"{folder}/cells{ranks}.json").write_text(json.dumps([asdict(c) for c in cells]))
                    print(line(cell, None), flush=True)
                if args.device == "cuda":
                    torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


def line(cell: Cell, one: float | None) -> str:
    """A row of the table; ``one``: milliseconds of the op on one rank."""
    start = f"{cell.ranks:5d} {cell.length:7d} {cell.band:7s} {cell.impl:25s}"
    if cell.error:
        return f"{start} {cell.error[:80]}"

    def number(x: float | None, form: str) -> str:
        return format(x, form) if x is not None else format("-", ">" + form.split(".")[0])

    speed = one / cell.both_ms if one and cell.both_ms else None
    share = None if cell.hidden is None else 100 * cell.hidden
    return (
        f"{start} {number(cell.forward_ms, '9.2f')} {number(cell.both_ms, '9.2f')} {number(cell.tflops, '8.1f')} "
        f"{number(speed, '8.2f')} {number(share, '7.0f')} {number(cell.sent_gb, '8.3f')} "
        f"{number(cell.peak_gib, '9.1f')}"
    )


HEADER = (
    "ranks  length band    implementation               fwd ms   fwd+bwd  TFLOP/s  speedup  hidden  sent GB  peak GiB\n"
    "                                                                     per rank  over op       %   rank 0"
)


def table(cells: list[Cell]) -> str:
    one = {(c.length, c.band): c.both_ms for c in cells if c.ranks == 1 and c.impl == "op"}
    return "\n".join([HEADER, *(line(cell, one.get((cell.length, cell.band))) for cell in cells)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--lengths", default="65536,131072,262144")
    parser.add_argument("--bands", nargs="+", default=list(BANDS), choices=BANDS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--window", type=int, default=4096, help="keys that a query sees under 'window', itself included"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=1e-2, help="largest relative distance from one rank")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--out", type=Path, default=RESULTS / "h200x2_context_parallel.json")
    args = parser.parse_args()
    if args.tiny:
        args.lengths, args.heads, args.kv_heads, args.head_dim, args.window, args.repeat = "128,192", 4, 2, 16, 24, 1
    args.lengths = [int(n) for n in args.lengths.split(",")]
    cells: list[Cell] = []
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.tensor", "flash_inductor.distributed"])
    print(HEADER, flush=True)
    for ranks in map(int, args.ranks.split(",")):
        if args.device == "cuda" and torch.cuda.device_count() < ranks:
            print(f"{ranks:5d} not run: there are {torch.cuda.device_count()} GPUs")
            continue
        with tempfile.TemporaryDirectory() as folder:
            processes = [context.Process(target=work, args=(rank, ranks, folder, args)) for rank in range(ranks)]
            for process in processes:
                process.start()
            while any(p.is_alive() for p in processes) and not any(p.exitcode for p in processes):
                time.sleep(0.2)
            for process in processes:
                if process.exitcode not in (0, None):
                    print(f"{ranks:5d} a rank ended with code {process.exitcode}")
                    for other in processes:
                        other.kill()
                process.join()
            path = Path(f"{folder}/cells{ranks}.json")
            cells += [Cell(**cell) for cell in json.loads(path.read_text())] if path.exists() else []
        cuda = args.device == "cuda"
        about = {
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or "CPU",
            "torch": torch.__version__,
            "command": "python benchmarks/distributed.py",
            "arguments": {
                name: str(x) if isinstance(x, Path) else x for name, x in vars(args).items() if name != "out"
            },
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**about, "cells": [asdict(cell) for cell in cells]}, indent=1) + "\n")
        title = f"{about['device']}, torch {about['torch']}; {vars(args)['heads']} heads, {args.kv_heads} key heads, "
        title += f"head dim {args.head_dim}, window {args.window}\n\n"
        args.out.with_suffix(".txt").write_text(title + table(cells) + "\n")
    print("\n" + table(cells))


if __name__ == "__main__":
    main()
